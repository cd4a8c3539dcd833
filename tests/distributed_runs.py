"""Training runs for tests/engine/processes/test_distributed.py: each in one process on all the data, or in two on a half of it each.

Run as a script, this is one of the two processes: ``python distributed_runs.py RANK FOLDER`` takes every run of ``RUNS`` and
leaves what it found in ``FOLDER``.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from helpers_engine import batches, mlp, spoil
from mezzo import NonFiniteLossError, ScaleFloorError, Session, SessionError
from processes import leave_process_group

Kind = Literal["one", "ddp", "fsdp", "hsdp"]
WORLD = 2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "mezzo.SGD": lambda p: mezzo.SGD(p, lr=0.1, momentum=0.9),
    "mezzo.AdamW": lambda p: mezzo.AdamW(p, lr=1e-2),
    "mezzo.AdamW 8bit": lambda p: mezzo.AdamW(p, lr=1e-2, moments="8bit"),
    "mezzo.Muon": lambda p: _muon(list(p)),
    "mezzo.Muon 8bit": lambda p: _muon(list(p), moments="8bit"),
    "mezzo.Adafactor": lambda p: mezzo.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "mezzo.Adafactor 8bit": lambda p: mezzo.Adafactor(p, lr=1e-2, moments="8bit"),
}
OF_MATRICES = [name for name in OPTIMIZERS if "Muon" in name or "Adafactor" in name]


def _muon(parameters: list[nn.Parameter], **settings: Any) -> mezzo.Muon:
    matrices, rest = ([p for p in parameters if (p.ndim == 2) is wanted] for wanted in (True, False))
    return mezzo.Muon([{"params": matrices}, {"params": rest, "use_muon": False, "lr": 1e-2}], lr=0.02, **settings)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Say how to train."""

    kind: Kind
    policy: str = "fp32"
    optimizer: str = "SGD"
    accumulate: int = 1
    clip_norm: float | None = None
    updates: int = 5
    spoiled: tuple[int, int, int] | None = None
    """Update, micro-batch and process whose gradients overflow."""
    rows: tuple[int, ...] = (4, 4)
    """Samples that each process has of a micro-batch of 8."""
    weighted: bool = False
    micro_batches: int = 0
    """In each window, if fewer than ``accumulate``: ``update`` closes it."""
    scheduled: bool = False
    unscaled: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """For DistributedDataParallel, or for fully_shard's MixedPrecisionPolicy."""


@dataclass
class Found:
    """Hold what a run left, the same in every process but for what it said."""

    weights: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    reduced: list[list[list[str]]] = field(default_factory=list)
    """For each update: collectives that add up, of each micro-batch's forward and backward pass and, last, of the update itself."""
    host_reads: list[int] = field(default_factory=list)
    """For each update, its forward and backward passes included."""
    error: str = ""


class Watch(TorchDispatchMode):
    """List the collectives that add numbers up, those of C++ included, and count what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.host_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::") and "reduce" in name:
            self.seen.append(name.removeprefix("c10d::").split(".")[0].strip("_"))
        self.host_reads += name == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))

    def taken(self) -> list[str]:
        """Return the collectives seen since the last call."""
        seen, self.seen = self.seen, []
        return seen


def wrapped(model: nn.Module, run: Run) -> nn.Module:
    """Return the model as the run's kind of training wants it."""
    if run.kind == "ddp":
        return DistributedDataParallel(model, **run.options)
    if run.kind in ("fsdp", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options = {"mp_policy": MixedPrecisionPolicy(**run.options)} if run.options else {}
        shape, names = ((WORLD, 1), ("replicate", "shard")) if run.kind == "hsdp" else ((WORLD,), None)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in [*model.children()]:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return model


def whole(parameter: Any) -> Tensor:
    """Return a parameter's values, gathered where it is sharded."""
    values = parameter.detach()
    return (values.full_tensor() if hasattr(values, "full_tensor") else values).float().clone()


def build(run: Run) -> tuple[Session, nn.Module]:
    """Return a session and its model for ``run``."""
    model = wrapped(mlp(6, 9, 3), run)  # 9 and 3 rows: shards of different sizes
    optimizer = OPTIMIZERS[run.optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if run.scheduled else None
    settings = {"policy": run.policy, "clip_norm": run.clip_norm, "scheduler": scheduler}
    halves = len(run.rows) if run.kind == "one" else 1
    return Session(model, optimizer, accumulate=run.accumulate * halves, **settings), model


def train(run: Run, rank: int = 0) -> Found:
    """Train as ``run`` says, in this process on the part of process ``rank`` or, of kind ``one``, on all parts in turn."""
    session, model = build(run)
    found = Found()
    data = iter(batches(run.updates * run.accumulate, size=sum(run.rows)))
    micro_batches = run.micro_batches or run.accumulate
    ranks = range(len(run.rows)) if run.kind == "one" else (rank,)
    watch = Watch()
    for update in range(run.updates):
        with watch:
            said: list[list[str]] = []
            for micro in range(micro_batches):
                x, y = next(data)
                for part in ranks:
                    mine = slice(sum(run.rows[:part]), sum(run.rows[: part + 1]))
                    with session.autocast():
                        logits = model(x[mine])
                        if run.spoiled == (update, micro, part):
                            logits = spoil(logits)
                        loss = F.cross_entropy(logits, y[mine])
                    session.backward(loss, weight=float(run.rows[part]) if run.weighted else None)
                said.append(watch.taken())
            if run.unscaled:
                session.unscale()
            session.update()
            found.reduced.append([*said, watch.taken()])
        found.host_reads.append(watch.host_reads)
        watch.host_reads = 0
        found.norms.append(session.grad_norm)
        found.scales.append(session.loss_scale)
        found.skipped.append(session.skipped)
        found.rates.append(session.optimizers[0].param_groups[0]["lr"])
    found.weights = [whole(p) for p in model.parameters()]
    return found


# --- the runs ---------------------------------------------------------------------------------------------------------

FP16 = "fp16:init_scale=1024:growth_interval=3"
VIEWS = {"gradient_as_bucket_view": True}
COPIES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
_PARALLEL: dict[str, Run] = {
    "fp32": Run(kind="ddp"),
    "fp32 clipped": Run(kind="ddp", clip_norm=0.3, optimizer="mezzo.AdamW"),
    "fp16": Run(kind="ddp", policy=FP16, optimizer="AdamW"),
    "fp16 one pass": Run(kind="ddp", policy=FP16, optimizer="mezzo.AdamW", clip_norm=0.3),
    "bf16 one pass": Run(kind="ddp", policy="bf16", optimizer="mezzo.SGD"),
    "fp16 accumulated": Run(kind="ddp", policy=FP16, optimizer="mezzo.SGD", accumulate=3, clip_norm=0.3),
    "bf16 accumulated": Run(kind="ddp", policy="bf16", accumulate=3, clip_norm=0.3),
    "overflow": Run(kind="ddp", policy=FP16, spoiled=(2, 0, 1), clip_norm=0.3, scheduled=True),
    "overflow early in a window": Run(
        kind="ddp", policy=FP16, optimizer="mezzo.SGD", accumulate=3, spoiled=(1, 0, 1), scheduled=True
    ),
    "overflow in the other process": Run(kind="ddp", policy=FP16, optimizer="mezzo.AdamW", spoiled=(3, 0, 0)),
    "weighted": Run(kind="ddp", policy=FP16, optimizer="mezzo.SGD", rows=(6, 2), weighted=True),
    "weighted, accumulated": Run(kind="ddp", rows=(6, 2), weighted=True, accumulate=3, clip_norm=0.3),
    "unscaled": Run(kind="ddp", policy=FP16, accumulate=2, unscaled=True, clip_norm=0.3, spoiled=(1, 0, 1)),
    "short windows": Run(kind="ddp", policy=FP16, accumulate=3, micro_batches=2, optimizer="mezzo.SGD"),
}
RUNS = {f"{kind}: {name}": replace(run, kind=kind) for name, run in _PARALLEL.items() for kind in ("ddp", "fsdp")}
RUNS |= {
    "ddp: fp16-master": Run(kind="ddp", policy="fp16-master:init_scale=1024", clip_norm=0.3, spoiled=(1, 0, 1)),
    "ddp: fp16-master one pass": Run(kind="ddp", policy="fp16-master:init_scale=1024", optimizer="mezzo.AdamW"),
    "ddp: 8-bit moments": Run(kind="ddp", optimizer="mezzo.AdamW 8bit"),
    "ddp: bf16-master one pass": Run(kind="ddp", policy="bf16-master", optimizer="mezzo.SGD", clip_norm=0.3),
    "ddp: static graph": Run(kind="ddp", accumulate=2, options={"static_graph": True}),
    "ddp: views": Run(kind="ddp", policy=FP16, accumulate=2, options=VIEWS),
    "ddp: short windows of views": Run(kind="ddp", accumulate=3, micro_batches=2, options=VIEWS),
    "fsdp: 16-bit copies": Run(kind="fsdp", policy="bf16", optimizer="mezzo.AdamW", options=COPIES),
    "hsdp: accumulated": Run(kind="hsdp", policy=FP16, optimizer="mezzo.SGD", accumulate=3, clip_norm=0.3),
    "hsdp: overflow": Run(kind="hsdp", policy=FP16, accumulate=2, spoiled=(1, 0, 1), clip_norm=0.3),
}


# --- what is more than training ---------------------------------------------------------------------------------------


class Gain(nn.Module):
    """Multiply by one number, whose gradient may be made larger than its square can be in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * spoil(self.gain, self.factor)


def _session(model: nn.Module, optimizer: str = "SGD", **settings: Any) -> Session:
    return Session(model, OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad]), **settings)


def _step(session: Session, model: nn.Module, rank: int, *, seed: int = 0, factor: float = 1.0) -> None:
    x, y = batches(1, size=8, seed=seed)[0]
    with session.autocast():
        logits = model(x[4 * rank : 4 * rank + 4])
        loss = F.cross_entropy(logits if factor == 1.0 else spoil(logits, factor), y[4 * rank : 4 * rank + 4])
    session.step(loss)


def one_large_gradient(kind: Kind, rank: int, factor: float) -> Any:
    """The gradient of one number, of which only one process has a part, is multiplied by ``factor`` in one process."""
    gain = Gain()
    model = wrapped(nn.Sequential(*mlp(6, 9, 3), gain), Run(kind=kind))
    session = _session(model, policy=FP16, clip_norm=1.0)
    gain.factor = factor if rank == 1 else 1.0
    _step(session, model, rank)
    return session.skipped, session.grad_norm, session.loss_scale


def loss_not_finite(kind: Kind, rank: int) -> Any:
    """One process's very first loss is not finite: all are told."""
    model = wrapped(mlp(6, 9, 3), Run(kind=kind))
    session = _session(model, policy="bf16", accumulate=2)
    for step in range(2):
        with session.autocast():
            loss = model(torch.ones(2, 6)).mean()
        try:
            session.step(loss * float("nan") if rank == 1 else loss)
        except NonFiniteLossError as error:
            return step, error.message
    return None


def floor(kind: Kind, rank: int, optimizer: str) -> Any:
    """One process overflows at the scale's floor: all raise in the same update."""
    model = wrapped(mlp(6, 9, 3), Run(kind=kind))
    session = _session(model, optimizer, policy="fp16:init_scale=2:min_scale=1")
    for update in range(5):
        try:
            _step(session, model, rank, factor=float("inf") if rank == 1 and update else 1.0)
        except ScaleFloorError as error:
            return update, session.skipped, session.loss_scale, error.message
    return None


def several_losses(kind: Kind, parts: list[int]) -> Any:
    """Two losses with scales of their own, one forward pass; the second overflows in one process at the second of four updates."""
    model = wrapped(mlp(6, 9, 3), Run(kind=kind))
    session = _session(model, "mezzo.SGD", policy=FP16, num_losses=2, accumulate=len(parts), clip_norm=0.3)
    for update, (x, _) in enumerate(batches(4)):
        for part in parts:
            with session.autocast():
                y = model(x[4 * part : 4 * part + 4])
                first, second = y.square().mean(), (spoil(y) if (update, part) == (1, 1) else y).abs().mean()
            session.backward(first, loss_id=0, retain_graph=True)
            session.backward(second, loss_id=1)
        session.update()
    return (
        [whole(p) for p in model.parameters()],
        [s.value() for s in session.scales],
        session.skipped,
        session.grad_norm,
    )


def two_backward_passes(kind: Kind, part: slice) -> Any:
    """Two backward passes from one forward pass: DistributedDataParallel averages the gradients of the first alone."""
    model = wrapped(mlp(6, 9, 3), Run(kind=kind))
    session = _session(model, policy="fp16:fp32=linear")  # a loss scale, and products to compare exactly
    for x, _ in batches(3):
        with session.autocast():
            y = model(x[part])
        session.backward(y.square().mean(), retain_graph=True)
        session.backward(y.mean())
        session.update()
    return [whole(p) for p in model.parameters()]


def two_players(kind: Kind, part: slice) -> Any:
    """A generator and a critic take turns."""
    generator, critic = wrapped(mlp(6, 9, 6), Run(kind=kind)), wrapped(mlp(6, 5, 1, seed=1), Run(kind=kind))
    players = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    session = Session([generator, critic], players, policy="fp32", clip_norm=0.3)
    for x, _ in batches(3):
        fake = generator(x[part])
        session.backward(critic(torch.cat([x[part], fake.detach()])).square().mean())
        session.update(players[1])
        session.backward(critic(fake).mean())
        session.update(players[0])
    return [whole(p) for model in (generator, critic) for p in model.parameters()], session.grad_norm


def both_kinds(kinds: tuple[Kind, Kind], part: slice) -> Any:
    """One optimizer and one norm over a replicated and a sharded model."""
    first, second = wrapped(mlp(6, 9), Run(kind=kinds[0])), wrapped(mlp(9, 3, seed=1), Run(kind=kinds[1]))
    optimizer = mezzo.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
    session = Session([first, second], optimizer, policy="fp32", clip_norm=0.3)
    for x, y in batches(3):
        with session.autocast():
            loss = F.cross_entropy(second(first(x[part])), y[part])
        session.step(loss)
    return [whole(p) for model in (first, second) for p in model.parameters()], session.grad_norm


def buffers(rank: int) -> list[Tensor]:
    """Running means where DistributedDataParallel itself never averages: they still come from the first process."""
    model = wrapped(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), Run(kind="ddp"))
    session = _session(model, policy="fp32", num_losses=2)
    for x, _ in batches(2):
        session.step(model(x[4 * rank : 4 * rank + 4]).square().mean())
    model.eval()
    model(torch.ones(1, 6))
    return [b.clone() for b in model.buffers()]


def unused_parameters(rank: int) -> Any:
    """Each process uses another branch; one branch is used by none. Averages of an open window count an unused one as zero."""
    branches = nn.ModuleList([nn.Linear(4, 2, bias=False) for _ in range(3)])
    for branch in branches:
        nn.init.ones_(branch.weight)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = branches

        def forward(self, x: Tensor) -> Tensor:
            return self.branches[rank](x)

    model = wrapped(Model(), Run(kind="ddp", options={"find_unused_parameters": True}))
    session = Session(model, torch.optim.SGD(model.parameters(), lr=1.0), policy="fp32", accumulate=2)
    session.step(model(torch.ones(1, 4)).sum())
    session.update()
    return [whole(p) for p in model.parameters()]


def saved_and_loaded(kind: Kind, optimizer: str, folder: Path, rank: int) -> Any:
    """Train 2 updates, save, train 2 more; a new session that loads the state comes to the same."""
    model = wrapped(mlp(6, 9, 3), Run(kind=kind))
    session = _session(model, optimizer, policy="fp16:init_scale=512:growth_interval=2")
    for seed in range(2):
        _step(session, model, rank, seed=seed)
    file = folder / f"{kind} {optimizer} {rank}.pt"
    torch.save(session.state_dict(), file)
    other = wrapped(mlp(6, 9, 3, seed=1), Run(kind=kind))
    restored = _session(other, optimizer, policy="fp16")
    restored.load_state_dict(torch.load(file))
    for seed in range(2, 4):
        _step(session, model, rank, seed=seed)
        _step(restored, other, rank, seed=seed)
    counts = [(s.updates, s.skipped, s.loss_scale, s.grad_norm) for s in (session, restored)]
    return [[whole(p) for p in m.parameters()] for m in (model, other)], counts, list(session.state_dict()["models"][0])


def matrices(kind: Kind, optimizer: str) -> Any:
    """Updates of whole matrices, the last of one row, of which a process has no part; the second update overflows.

    All processes take the same batches, so that averages of gradients are exact.
    """
    model = wrapped(mlp(6, 9, 1), Run(kind=kind))
    session = _session(model, optimizer, policy="fp16:init_scale=512")
    for number, (x, _) in enumerate(batches(4)):
        with session.autocast():
            loss = model(x).square().mean()
        session.step(spoil(loss) if number == 1 else loss)
    states = session.optimizers[0].state_dict()["state"]
    kept = {
        name: [whole(s[name]) for s in states.values() if name in s]
        for name in ("momentum_buffer", "row_var", "col_var")
    }
    return (
        [whole(p) for p in model.parameters()],
        kept["momentum_buffer"],
        kept["row_var"] + kept["col_var"],
        session.skipped,
    )


def snapshot(kind: Kind, optimizer: str, folder: Path, rank: int) -> Any:
    """Train 2 updates, take a snapshot, train 2 more; another session that loads it comes to the same."""
    where = folder / f"snapshot {kind} {optimizer}"
    model, other = (wrapped(mlp(6, 9, 1, seed=seed), Run(kind=kind)) for seed in range(2))
    session, restored = (_session(one, optimizer, policy="fp16:init_scale=512") for one in (model, other))
    data = [x for x, _ in batches(4)]

    def train_on(trained: Session, net: nn.Module, inputs: list[Tensor]) -> None:
        for x in inputs:
            with trained.autocast():
                loss = net(x).square().mean()
            trained.step(loss)

    train_on(session, model, data[:2])
    session.save(where).wait()
    restored.load(where)
    train_on(session, model, data[2:])
    train_on(restored, other, data[2:])
    return [[whole(p) for p in one.parameters()] for one in (model, other)]


def refused(build: Callable[[], Any]) -> str:
    """Return the message and hint of a session that cannot be built."""
    with pytest.raises(SessionError) as caught:
        build()
    return str(caught.value)


def _built_too_early() -> Session:
    model = mlp(6, 9, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Session(wrapped(model, Run(kind="fsdp")), optimizer)


def _with_hook() -> Session:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = wrapped(mlp(6, 9, 3), Run(kind="ddp"))
    model.register_comm_hook(None, allreduce_hook)  # type: ignore[operator]
    return _session(model, policy="fp16-master")


REFUSED: dict[str, Callable[[], Any]] = {
    "sharded masters": lambda: _session(wrapped(mlp(6, 9, 3), Run(kind="fsdp")), policy="fp16-master"),
    "optimizer before fully_shard": _built_too_early,
    "a model left out": lambda: _session(nn.ModuleList([wrapped(mlp(6, 9, 3), Run(kind="ddp")), nn.Linear(3, 1)])),
    "hook before the session": _with_hook,
}


def hybrid_short_window(rank: int) -> str:
    """A window closed early on a mesh with replicas."""
    model = wrapped(mlp(6, 9, 3), Run(kind="hsdp"))
    session = _session(model, accumulate=2)
    _step(session, model, rank)
    return refused(session.update)


def formats_exchanged(rank: int) -> Any:
    """DistributedDataParallel's buckets under a policy that casts weights, and whether the model can still be copied."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = wrapped(mlp(6, 9, 3), Run(kind="ddp"))
    session = _session(model, policy="fp16-master")
    seen = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # torch refuses other annotations
        seen.append(bucket.buffer().dtype)
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)  # type: ignore[operator]
    _step(session, model, rank)
    copy.deepcopy(model)
    return seen, [c.reason for c in session.explain() if c.what == "processes"]


def alone(rank: int) -> bool:
    """A model that is not shared, in a group of processes."""
    return _session(mlp(6, 9, 3)).processes.several


def scenes(rank: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return by name what is tried besides training."""
    tried: dict[str, Callable[[], Any]] = {
        f"refused: {name}": functools.partial(refused, build) for name, build in REFUSED.items()
    }
    for scene in (buffers, unused_parameters, hybrid_short_window, formats_exchanged, alone):
        tried[scene.__name__] = functools.partial(scene, rank)
    for kind in ("ddp", "fsdp", "hsdp"):
        tried[f"large squares {kind}"] = functools.partial(one_large_gradient, kind, rank, 1e25)
        tried[f"one overflow {kind}"] = functools.partial(one_large_gradient, kind, rank, math.inf)
    mine = slice(4 * rank, 4 * rank + 4)
    tried["matrices hsdp mezzo.Muon"] = functools.partial(matrices, "hsdp", "mezzo.Muon")
    tried["both kinds"] = functools.partial(both_kinds, ("ddp", "fsdp"), mine)
    for kind in ("ddp", "fsdp"):
        tried[f"several losses {kind}"] = functools.partial(several_losses, kind, [rank])
        tried[f"two backward passes {kind}"] = functools.partial(two_backward_passes, kind, mine)
        tried[f"two players {kind}"] = functools.partial(two_players, kind, mine)
        tried[f"loss {kind}"] = functools.partial(loss_not_finite, kind, rank)
        for name in ("SGD", "mezzo.SGD"):
            tried[f"floor {kind} {name}"] = functools.partial(floor, kind, rank, name)
        for name in OF_MATRICES:
            tried[f"matrices {kind} {name}"] = functools.partial(matrices, kind, name)
            tried[f"snapshot {kind} {name}"] = functools.partial(snapshot, kind, name, folder, rank)
        for name in ("AdamW", "mezzo.AdamW", "mezzo.AdamW 8bit", *OF_MATRICES):
            tried[f"state {kind} {name}"] = functools.partial(saved_and_loaded, kind, name, folder, rank)
    return tried


@contextmanager
def joined(rank: int, folder: Path) -> Iterator[None]:
    """Belong to a group of processes."""
    address = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        leave_process_group()


def main(rank: int, folder: Path) -> None:
    """Take every run and leave what was found."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with joined(rank, folder):
        for name, run in RUNS.items():
            try:
                found[name] = train(run, rank)
            except Exception:
                found[name] = Found(error=traceback.format_exc())
        for name, scene in scenes(rank, folder).items():
            try:
                found[name] = scene()
            except Exception:
                found[name] = traceback.format_exc()
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    import distributed_runs  # by its name, under which the parent finds the class of what is saved

    distributed_runs.main(int(sys.argv[1]), Path(sys.argv[2]))
