"""Mixed-precision training that people can turn on, trust and prove.

The imports below are the library, for type checkers and for ``__getattr__``, which imports a name on first use: ``import mezzo``
costs nothing and needs no torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mezzo.version import VERSION

if TYPE_CHECKING:
    from mezzo.callables import audit as audit
    from mezzo.callables import diagnose as diagnose
    from mezzo.callables import fallback as fallback
    from mezzo.callables import ranges as ranges
    from mezzo.engine.fast_path import fast_path as fast_path
    from mezzo.engine.optimizers.adafactor import Adafactor as Adafactor
    from mezzo.engine.optimizers.adamw import AdamW as AdamW
    from mezzo.engine.optimizers.muon import Muon as Muon
    from mezzo.engine.optimizers.sgd import SGD as SGD
    from mezzo.engine.scaling import DynamicScale as DynamicScale
    from mezzo.engine.scaling import NoScale as NoScale
    from mezzo.engine.scaling import StaticScale as StaticScale
    from mezzo.engine.session import Session as Session
    from mezzo.engine.session_errors import PrecisionWarning as PrecisionWarning
    from mezzo.errors import ContractError as ContractError
    from mezzo.errors import MezzoError as MezzoError
    from mezzo.errors import NonFiniteLossError as NonFiniteLossError
    from mezzo.errors import PolicyError as PolicyError
    from mezzo.errors import RecordError as RecordError
    from mezzo.errors import ScaleFloorError as ScaleFloorError
    from mezzo.errors import ScriptError as ScriptError
    from mezzo.errors import SessionError as SessionError
    from mezzo.errors import SnapshotError as SnapshotError
    from mezzo.errors import UnsupportedFormatError as UnsupportedFormatError
    from mezzo.explain import Choice as Choice
    from mezzo.measure.checkpointing.plan import checkpoint as checkpoint
    from mezzo.observe.compare_points import compare_point as compare_point
    from mezzo.observe.contracts.expectation import expect as expect
    from mezzo.policy import Policy as Policy
    from mezzo.records import read_record as read_record


__version__ = VERSION


def __getattr__(name: str) -> object:
    from mezzo.lazy_names import value_of

    return value_of("mezzo", name)


def __dir__() -> list[str]:
    from mezzo.lazy_names import modules_by_name

    return sorted(modules_by_name("mezzo"))


def load_ipython_extension(shell: Any) -> None:
    """Add ``%mezzo`` and ``%%mezzo`` to IPython: what ``%load_ext mezzo`` calls."""
    from mezzo.notebook import load

    load(shell)


if "IPython" in sys.modules:
    from mezzo.notebook import show_records_in_running_shell

    show_records_in_running_shell()
