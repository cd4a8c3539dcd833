"""A port for a store that another process opens some seconds later. Imports no torch."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _USUAL = 10_240, 32_768
"""The lowest port that is chosen, and the first port of outgoing connections where the system does not tell."""
_TRIES = 100


def free_port() -> int:
    """Return a port that is free and stays so: one below the range that the system uses for outgoing connections.

    A port that the system chooses lies in that range: until the store is opened, any connection on the machine, such as one between
    processes of another job, may take it.
    """
    chance, first = random.SystemRandom(), _first_of_connections()
    for _ in range(_TRIES if first > _LOWEST else 0):
        port = chance.randrange(_LOWEST, first)
        with suppress(OSError), socket.socket() as one:
            one.bind(("", port))
            return port
    with socket.socket() as one:  # nearly all are taken, or the range begins low
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _first_of_connections() -> int:
    try:
        return int(_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL
