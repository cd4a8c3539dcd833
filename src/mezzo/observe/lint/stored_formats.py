"""Check in which formats weights and an optimizer's state are stored, and whether FP32 ones still have more digits than 16-bit numbers.

Formats are read on the host. Values are sampled, before some updates and before the next one: copies of a few numbers stay on the
device until the end of the run, so no step waits for them.

An FP32 number that is also a BF16 number has 16 zero bits at its end. One in 65,536 results of FP32 arithmetic has them by chance, so a
few dozen such numbers, in two updates, prove that something rounded them. Zeros and powers of two prove nothing and do not count, nor
does a number that did not change.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from mezzo.engine.casts.conversion import HALF
from mezzo.engine.gradients import trained_leaves
from mezzo.engine.processes.shards import local
from mezzo.formats import BF16, FP16, FP32, format_of
from mezzo.observe.lint.misuse_log import ENOUGH, MisuseLog, NamedParameters
from mezzo.observe.lint.torch_calls import CallMode
from mezzo.observe.source_lines import running_line
from mezzo.observe.tensors import format_name, readable, region, storage_of

COMPARED = (1, 2, 3, 4, 8, 16, 32)
"""The updates of an optimizer before which its numbers are sampled; they are compared with those before the next update."""
_DECAYED = (1, 2)
"""The updates whose operations on 16-bit weights are inspected."""
_MOST_OPTIMIZERS = 16
_MOST_TENSORS = 64
_MOST_NUMBERS = 256
_LEAST = 8
"""Numbers of a tensor that have to prove that it was rounded."""
_MANY = 256
_LEAST_STILL = 32
"""Numbers with a gradient from which a share is taken."""
_STILL = 0.75
"""Share of a weight's numbers that have to stand still."""
_WEIGHT = ""
_GRADIENT = "gradient"
_ACCUMULATES = re.compile(r"avg|mom|ema|sum|square|variance|master|exp_inf|acc_delta|^[mv]$")
"""Names of state that every update adds to: a copy of a gradient or of old weights may be a 16-bit number by right."""
_KNOWN = re.compile(
    r"^(step|momentum_buffer|exp_avg|exp_avg_sq|max_exp_avg_sq|exp_inf|square_avg|grad_avg|acc_delta|[mv])$"
)
"""State that holds no part of a weight; other state may be a master weight, or what a 16-bit weight has lost."""
_MOST_NAMED = 4
_FRACTION = 0x7FFFFF
"""The bits of FP32's fraction, which are 0 in a power of two."""

_Key: TypeAlias = tuple[int, str]
"""A parameter's identity and the name of a tensor of its state."""


class _Sample(NamedTuple):
    """Numbers of all tensors of one name, one format and one device."""

    parameters: list[int]
    sizes: list[int]
    values: Tensor

    def split(self) -> list[tuple[int, Tensor]]:
        """Return the identity of each parameter with its numbers, on the CPU."""
        return list(zip(self.parameters, self.values.cpu().split(self.sizes), strict=True))


_Samples: TypeAlias = dict[tuple[str, torch.dtype, torch.device], _Sample]


class _Compared(NamedTuple):
    """Samples before one update, and before the next or after loading (then the first is None)."""

    update: int
    line: str
    step: int
    before: _Samples | None
    after: _Samples


class _Loaded(NamedTuple):
    """A call of ``load_state_dict``: its line and step, and the formats that it was given."""

    line: str
    step: int
    given: dict[_Key, torch.dtype]


@dataclass
class _Decay:
    """Weight decay that rounding undoes: the factor and where it was seen first."""

    factor: float
    line: str
    step: int
    weights: dict[int, torch.dtype] = field(default_factory=dict)
    updates: set[int] = field(default_factory=set)


@dataclass
class _Seen:
    """What is known of one optimizer, which may be gone before the end of the run."""

    kind: str
    own: bool
    """Whether its class is not torch's: it may round at random, which moves some weights, or keep what a weight has lost."""
    names: NamedParameters
    num_updates: int = 0
    formats: dict[_Key, torch.dtype] = field(default_factory=dict)
    samples: _Samples | None = None
    line: str = ""
    step: int = 0
    loaded: _Loaded | None = None
    compared: list[_Compared] = field(default_factory=list)
    decay: _Decay | None = None
    keeps_parts: bool = False
    """Whether its state may hold what 16-bit weights have lost: masters, or compensation."""


class StoredFormats:
    """The stored formats of all optimizers."""

    def __init__(self, log: MisuseLog) -> None:
        self._log = log
        self._seen: WeakKeyDictionary[Optimizer, _Seen] = WeakKeyDictionary()
        self._all: list[_Seen] = []
        self._calls = CallMode()

    # --- what the lint reports ---------------------------------------------------------------------------------------------------

    def begins(self, optimizer: Optimizer, *, step: int) -> None:
        """Record that an optimizer is about to step."""
        seen = self._of(optimizer)
        if seen is None:
            return
        seen.num_updates += 1
        number, line = seen.num_updates, running_line()
        if number == 1 or seen.loaded is not None:
            seen.names = self._log.named(trained_leaves(optimizer))  # models are known by now
        if seen.loaded is not None:
            self._check_loaded(optimizer, seen, seen.loaded)
        due, begun = number in COMPARED, number - 1 in COMPARED
        if not (due or begun):
            return
        formats, samples = formats_of(optimizer), _samples(optimizer)
        if begun:
            changed = {key: (was, formats[key]) for key, was in seen.formats.items() if formats.get(key, was) != was}
            self._add_changed(seen, changed, f"before an update of {seen.kind} and {{}} after it", seen.line, seen.step)
            if seen.samples is not None:
                seen.compared.append(_Compared(number - 1, seen.line, seen.step, seen.samples, samples))
            seen.keeps_parts = _keeps_parts(optimizer)
        seen.formats, seen.line, seen.step = formats, line, step
        seen.samples = samples if due else None
        weights = [p for p in trained_leaves(optimizer) if p.dtype in HALF] if number in _DECAYED else []
        if weights:
            self._calls.start(_DecayView(weights, seen, line, step))

    def stop(self) -> None:
        """Record that an optimizer has stepped, or that nothing more is to be inspected."""
        self._calls.stop()

    @contextmanager
    def loads(self, optimizer: Optimizer, state: Any, *, step: int) -> Iterator[None]:
        """Record a call of ``load_state_dict``; what came of it is read before the next update, when the library is done with it."""
        given = _given(optimizer, state)
        line = running_line()
        yield
        seen = self._of(optimizer) if given else None
        if seen is not None:
            seen.loaded = _Loaded(line, step, given)

    def report(self) -> None:
        """Read the samples from the device, and report."""
        for seen in self._all:
            compared, seen.compared = seen.compared, []
            self._report_rounded(seen, compared)
            self._report_still(seen, [one for one in compared if one.before is not None])
            self._report_decay(seen)

    def _of(self, optimizer: Optimizer) -> _Seen | None:
        """Return what is known of an optimizer; None beyond the first few, since a script may create one in each step."""
        seen = self._seen.get(optimizer)
        if seen is None and len(self._all) < _MOST_OPTIMIZERS:
            own = not type(optimizer).__module__.startswith("torch.optim")
            seen = _Seen(type(optimizer).__name__, own, self._log.named(()))
            self._seen[optimizer] = seen
            self._all.append(seen)
        return seen

    # --- formats -----------------------------------------------------------------------------------------------------------------

    def _check_loaded(self, optimizer: Optimizer, seen: _Seen, loaded: _Loaded) -> None:
        """Check what ``load_state_dict`` made of the state that it was given, and begin to check its numbers."""
        seen.loaded = None
        now = formats_of(optimizer)
        changed = {key: (was, now[key]) for key, was in loaded.given.items() if now.get(key, was) != was}
        when = f"in the state that {seen.kind} loads and {{}} after load_state_dict"
        self._add_changed(seen, changed, when, loaded.line, loaded.step)
        if not changed:
            seen.compared.append(_Compared(0, loaded.line, loaded.step, None, _samples(optimizer)))

    def _add_changed(
        self, seen: _Seen, changed: Mapping[_Key, tuple[torch.dtype, torch.dtype]], when: str, line: str, step: int
    ) -> None:
        """Report state whose format changed, by change; ``when`` has a place for the new format."""
        for was, now in dict.fromkeys(changed.values()):
            keys = [key for key, change in changed.items() if change == (was, now)]
            detail = f"{_tensors(seen, keys)}: {_name(was)} {when.format(_name(now))}"
            self._log.add("A628", detail, named=seen.names.modules(p for p, _ in keys), line=line, step=step)

    # --- rounded FP32 numbers ----------------------------------------------------------------------------------------------------

    def _report_rounded(self, seen: _Seen, compared: Sequence[_Compared]) -> None:
        """Report FP32 state and weights that keep only numbers of a 16-bit format."""
        times: dict[tuple[_Key, str], int] = defaultdict(int)
        """How often the numbers of a tensor were found to be of a format."""
        for one in compared:
            rounded, wide = _rounded(one)
            if one.before is None:
                self._report_loaded(seen, one, rounded, wide)
            elif one.update > 1:  # the first update copies the gradient into the state of some optimizers
                for found in rounded.items():
                    times[found] += 1
        for form in dict.fromkeys(form for (_, form), count in times.items() if count >= ENOUGH):
            keys = [key for (key, other), count in times.items() if other == form and count >= ENOUGH]
            first = next(one for one in compared if one.update > 1)
            what = f"the inspected updates of {seen.kind} left only numbers of {form.upper()}"
            detail = f"{_tensors(seen, keys)}: FP32, but {what}"
            modules = seen.names.modules(p for p, _ in keys)
            self._log.add("A629", detail, named=modules, line=first.line, step=first.step)

    def _report_loaded(self, seen: _Seen, one: _Compared, rounded: Mapping[_Key, str], wide: Container[str]) -> None:
        """Report what was loaded if all tensors of one name hold 16-bit numbers only: the rest of their digits is lost."""
        keys = [key for key in rounded if key[1] not in wide]
        for form in dict.fromkeys(rounded[key] for key in keys):
            of_form = [key for key in keys if rounded[key] == form]
            what = f"load_state_dict of {seen.kind} left only numbers of {form.upper()}"
            detail = f"{_tensors(seen, of_form)}: FP32, but {what}"
            modules = seen.names.modules(p for p, _ in of_form)
            self._log.add("A629", detail, named=modules, line=one.line, step=one.step)

    # --- lost updates ------------------------------------------------------------------------------------------------------------

    def _report_still(self, seen: _Seen, pairs: Sequence[_Compared]) -> None:
        """Report 16-bit weights that updates leave as they are."""
        still: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        """For each weight: numbers that stood still, and numbers with a gradient."""
        formats: dict[int, torch.dtype] = {}
        for one in pairs:
            for parameter, dtype, num_still, total in _still(one):
                formats[parameter] = dtype
                still[parameter][0] += num_still
                still[parameter][1] += total
        shares = {p: num_still / total for p, (num_still, total) in still.items() if total >= _LEAST_STILL}
        lost = {p: share for p, share in shares.items() if share >= (1.0 if seen.own else _STILL)}
        certain = not seen.own or (len(lost) == len(shares) and self._many(still) and not seen.keeps_parts)
        only_biases = all(
            seen.names.parameter(p).endswith("bias") for p in lost
        )  # before a norm their gradients are noise
        if only_biases or len(pairs) < ENOUGH or not certain:
            return
        listed = [f"{share:.0%} of {seen.names.parameter(p)}" for p, share in lost.items()]
        more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
        form = _name(formats[next(iter(lost))])
        what = f"{', '.join(listed[:_MOST_NAMED])}{more} stand still"
        detail = f"{seen.kind} updates {form} weights, and of a sample with gradients {what}"
        modules = seen.names.modules(lost)
        self._log.add("A633", detail, named=modules, line=pairs[0].line, step=pairs[0].step, count=len(pairs))

    @staticmethod
    def _many(still: Mapping[int, Sequence[int]]) -> bool:
        """Return whether so many numbers stood still that rounding at random would have moved one."""
        return sum(num_still for num_still, _ in still.values()) >= _MANY

    def _report_decay(self, seen: _Seen) -> None:
        """Report weight decay that rounding undoes."""
        decay, seen.decay = seen.decay, None
        if decay is not None:
            form = _name(next(iter(decay.weights.values())))
            detail = (
                f"weight decay of {seen.kind} multiplies {form} weights by {decay.factor:.8g}, which rounding undoes"
            )
            modules = seen.names.modules(decay.weights)
            self._log.add("A633", detail, named=modules, line=decay.line, step=decay.step, count=len(decay.updates))


class _DecayView:
    """An observer of products of 16-bit weights with numbers so close to 1 that rounding undoes them."""

    def __init__(self, weights: Sequence[Tensor], seen: _Seen, line: str, step: int) -> None:
        self._weights = {storage_of(p): p for p in weights}
        self._seen, self._line, self._step = seen, line, step

    def inspect_call(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Inspect one finished call."""
        if name not in ("mul_", "__imul__", "_foreach_mul_") or len(args) < 2 or type(args[1]) is not float:
            return
        given = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
        weights = [w for t in given if t.dtype in HALF and (w := self._weights.get(storage_of(t))) is not None]
        lost = [w for w in weights if 0 < abs(1 - args[1]) < _eps(w.dtype) / 4]
        if lost:
            decay = self._seen.decay = self._seen.decay or _Decay(args[1], self._line, self._step)
            decay.weights.update((id(w), w.dtype) for w in lost)
            decay.updates.add(self._seen.num_updates)


def formats_of(optimizer: Optimizer) -> dict[_Key, torch.dtype]:
    """Return the formats of an optimizer's state."""
    return {
        (id(p), key): value.dtype
        for p in trained_leaves(optimizer)
        for key, value in _state_of(optimizer, p).items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == p.numel() > 1
    }


def _given(optimizer: Optimizer, state: Any) -> dict[_Key, torch.dtype]:
    """Return the formats in what ``load_state_dict`` is given, by the parameters that it belongs to."""
    try:
        numbers = [n for group in state["param_groups"] for n in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = list(zip(numbers, parameters, strict=True))
        return {
            (id(p), key): value.dtype
            for number, p in pairs
            for key, value in state["state"].get(number, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() == p.numel() > 1
        }
    except (KeyError, TypeError, ValueError, AttributeError):  # a state of another form, which torch refuses
        return {}


def _state_of(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    state = optimizer.state.get(parameter, {})
    return state if isinstance(state, Mapping) else {}


def _samples(optimizer: Optimizer) -> _Samples:
    """Return copies of a few numbers of FP32 weights and state, and of 16-bit weights and their gradients."""
    parts: dict[tuple[str, torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    rates = {id(p): group.get("lr", 1.0) for group in optimizer.param_groups for p in group["params"]}
    leaves = trained_leaves(optimizer)
    step = max(1, -(-len(leaves) // _MOST_TENSORS))
    with torch.no_grad(), _disable_current_modes():
        for p in leaves[::step]:
            for key, values in _sampled(p, _state_of(optimizer, p), rates[id(p)]):
                parts[key, values.dtype, values.device].append((p, values))
        return {
            where: _Sample([id(p) for p, _ in found], [len(v) for _, v in found], torch.cat([v for _, v in found]))
            for where, found in parts.items()
        }


def _sampled(parameter: Tensor, state: Mapping[str, Any], rate: Any) -> Iterator[tuple[str, Tensor]]:
    if parameter.dtype in HALF:
        gradient, values = parameter.grad, _some(parameter)
        same = gradient is not None and gradient.layout is torch.strided and gradient.stride() == parameter.stride()
        if gradient is not None and same and values is not None and (some := _some(gradient)) is not None:
            yield _WEIGHT, values
            yield _GRADIENT, some * (rate if isinstance(rate, Tensor) else float(rate != 0))
    for key, value in ((_WEIGHT, parameter), *state.items()):
        wide = isinstance(value, Tensor) and value.dtype == FP32.dtype and value.shape == parameter.shape
        if wide and (not key or _ACCUMULATES.search(key)) and (some := _some(value)) is not None:
            yield key, some


def _some(tensor: Tensor) -> Tensor | None:
    """Return a view of some numbers of a tensor that lie evenly in its memory; None if it has none of its own."""
    part = local(tensor).detach()
    spans = region(part)[2:] if part.layout is torch.strided and readable(part) else ((0, 0), (0, 0))
    if len(spans) > 1 or (spans and spans[0][0] != 1):  # sparse, empty, or with gaps
        return None
    apart = max(1, part.numel() // _MOST_NUMBERS)
    return part.as_strided((min(_MOST_NUMBERS, part.numel()),), (apart,), part.storage_offset())


def _rounded(one: _Compared) -> tuple[dict[_Key, str], set[str]]:
    """Return the FP32 tensors whose numbers are all of a 16-bit format, with its name, and the names of tensors with others."""
    found: dict[_Key, str] = {}
    wide: set[str] = set()
    for where, sample in one.after.items():
        key, dtype, _ = where
        if dtype != FP32.dtype or key == _GRADIENT:
            continue
        before = None if one.before is None else one.before.get(where)
        old = {} if before is None else dict(before.split())
        for parameter, values in sample.split():
            proof = values.isfinite() & (values.view(torch.int32) & _FRACTION != 0)
            was = old.get(parameter)
            if one.before is not None:
                if was is None or len(was) != len(values):
                    continue
                proof &= values != was
            changed = values[proof]
            form = next((f.name for f in (BF16, FP16) if bool((changed.to(f.dtype).float() == changed).all())), None)
            if form is None:
                wide.add(key)
            elif len(changed) >= _LEAST:
                found[parameter, key] = form
    return found, wide


def _still(one: _Compared) -> Iterator[tuple[int, torch.dtype, int, int]]:
    """Yield each 16-bit weight with how many of its numbers an update left as they were, and how many have a gradient."""
    assert one.before is not None
    gradients = {p: g for (key, _, _), sample in one.before.items() if key == _GRADIENT for p, g in sample.split()}
    for where, sample in one.before.items():
        after = one.after.get(where)
        if where[0] != _WEIGHT or where[1] not in HALF or after is None:
            continue
        later = dict(after.split())
        for parameter, values in sample.split():
            now, gradient = later.get(parameter), gradients.get(parameter)
            if now is not None and gradient is not None and len(now) == len(values):
                moves = (gradient != 0) & gradient.isfinite()
                yield parameter, where[1], int(((now == values) & moves).sum()), int(moves.sum())


def _keeps_parts(optimizer: Optimizer) -> bool:
    """Return whether the state may hold what 16-bit weights have lost: masters, or compensation."""
    return any(
        isinstance(value, Tensor) and value.numel() == p.numel() and not _KNOWN.match(key)
        for p in trained_leaves(optimizer)
        for key, value in _state_of(optimizer, p).items()
    )


def _tensors(seen: _Seen, keys: Sequence[_Key]) -> str:
    """Return the name of the first of some weights, or of tensors of their state, and how many more there are."""
    parameter, key = keys[0]
    first = f"{key} of {seen.names.parameter(parameter)}" if key else seen.names.parameter(parameter)
    return f"{first} and {len(keys) - 1} more" if len(keys) > 1 else first


def _name(dtype: torch.dtype) -> str:
    return format_name(dtype).upper()


def _eps(dtype: torch.dtype) -> float:
    form = format_of(dtype)
    assert form is not None
    return form.eps
