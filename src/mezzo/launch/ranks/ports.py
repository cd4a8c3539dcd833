"""A free port for a store that another process opens some seconds later. Imports no torch."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _USUAL = 10_240, 32_768
"""The lowest port that is chosen, and the usual first port of outgoing connections, for systems that do not report theirs."""
_TRIES = 100


def free_port() -> int:
    """Return a port that is free and remains so: one below the range that the system uses for outgoing connections.

    A port that the system chooses lies in that range: until the store is opened, any connection on the machine, such as one between
    processes of another job, may use it.
    """
    generator, first = random.SystemRandom(), _first_outgoing_port()
    for _ in range(_TRIES if first > _LOWEST else 0):
        port = generator.randrange(_LOWEST, first)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    with socket.socket() as probe:  # nearly all are in use, or the range begins low
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _first_outgoing_port() -> int:
    try:
        return int(_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL
