"""What ``ranges`` counts in training steps, against values collected by hand, and how it copes with difficult scripts."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
import record_builders as build
from forked_processes import in_forks
from helpers_backward import BOTH_WAYS
from helpers_launch import as_script, children_in_this_process
from helpers_values import existing, record_at
from mezzo import Policy, PolicyError, ScriptError, SessionError, cli
from mezzo.launch.torch import switched
from mezzo.observe.ranges.table import SCALES
from mezzo.observe.settings import RangesSettings
from mezzo.records import Histogram, RangesRecord
from paths import SCRIPTS

BATCHES = [torch.randn(8, 6, generator=torch.Generator().manual_seed(k)) for k in range(12)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(16, 4)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean() * 1e-5
    return loss


def histogram(record: RangesRecord, kind: str, name: str) -> Histogram:
    found = [t.histogram for t in record.tensors if (t.kind, t.name) == (kind, name)]
    assert len(found) == 1, [(t.kind, t.name) for t in record.tensors]
    return found[0]


def same(own: Histogram, values: list[Tensor]) -> None:
    together = torch.cat([v.detach().reshape(-1) for v in values])
    assert (own.total, own.zeros) == (together.numel(), int((together == 0).sum()))
    exponents = together[together != 0].double().abs().log2().floor().int()
    for place, count in enumerate(own.counts):
        assert count == int((exponents == own.first_exponent + place).sum())


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
) -> None:
    for x in BATCHES[:steps]:
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()


def still(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that moves nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


@BOTH_WAYS
def test_counts_are_those_of_values_collected_by_hand() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept: dict[str, list[Tensor]] = {}

    def keep(name: str, value: Tensor) -> None:
        kept.setdefault(name, []).append(value.detach().clone())

    for x in BATCHES[:3]:
        optimizer.zero_grad()
        first = model[0](x)
        keep("activations 0", first)
        first.register_hook(lambda g: keep("activation gradients 0", g))
        second = model[1](first)
        keep("activations 1", second)
        last = model[2](second)
        keep("activations 2.0", last)
        last.register_hook(lambda g: keep("activation gradients 2.0", g))
        keep("activations Sequential (input)", x)
        (last.pow(2).mean() * 1e-5).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for (name, p), old in zip(model.named_parameters(), before, strict=True):
            assert p.grad is not None
            keep(f"weight gradients {name}", p.grad)
            keep(f"weights {name}", old)
            keep(f"updates {name}", p - old)

    fresh = net()
    record = mezzo.ranges(lambda: plain(fresh, torch.optim.AdamW(fresh.parameters(), lr=1e-2), 8), steps=3)
    assert record.steps_watched == [1, 2, 3]
    assert record.run.policy == "fp32"
    counted = {f"{t.kind} {t.name}": t.histogram for t in record.tensors}
    for label, values in kept.items():
        same(counted[label], values)
    assert counted.keys() == {*kept, "activation gradients 1"}
    # The function was ended at its fourth backward pass, after three updates.
    assert torch.equal(fresh[0].weight, model[0].weight)

    grads = torch.cat([v.reshape(-1) for label, vs in kept.items() if label.startswith("weight gradients") for v in vs])
    casts = next(k.casts[0] for k in record.kinds if k.kind == "weight gradients")
    for scale in (-4, 0, 5, 10):
        zeroed = int(((grads != 0) & ((grads * 2.0**scale).half() == 0)).sum())
        assert casts.zeroed[SCALES.index(scale)] == zeroed
    assert casts.zeroed[SCALES.index(0)] > 0


@BOTH_WAYS
def test_swallowed_updates_are_those_that_leave_a_rounded_weight_as_it_was() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 0.001, 100.0]))
    steps = torch.tensor([2.0**-12, 2.0**-10, 2.0**-7, 2.0**-12, 0.0])  # SGD with lr 1 takes them off

    def train() -> None:
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (weight * steps).sum().backward()
        optimizer.step()

    fp16, bf16 = mezzo.ranges(train, steps=1).updates
    # 1 - 2^-12 is a tie in FP16 (spacing 2^-11 below 1) that goes to 1, which is even; BF16's spacing is 2^-8.
    assert (fp16.format, fp16.num_updates, fp16.num_swallowed) == ("fp16", 4, 1)
    assert (bf16.format, bf16.num_updates, bf16.num_swallowed) == ("bf16", 4, 2)
    assert bf16.share == 0.5
    assert list(fp16.worst.values()) == [0.25]


@BOTH_WAYS
def test_gradients_are_counted_before_accumulation_and_clipping() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    alone: list[Tensor] = []
    for x in BATCHES[:4]:
        alone += torch.autograd.grad(loss_of(model, x), [model[0].weight])

    def train() -> None:
        for number, x in enumerate(BATCHES[:4]):
            loss_of(model, x).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-12)
                optimizer.step()
                optimizer.zero_grad()

    same(histogram(mezzo.ranges(train, steps=2), "weight gradients", "0.weight"), alone)


def test_evaluation_is_not_counted() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for x in BATCHES[:4]:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.full((100, 6), 1e9))

    record = mezzo.ranges(train, steps=3)
    assert histogram(record, "activations", "0").total == 3 * 8 * 16
    assert histogram(record, "activations", "0").last_exponent < 10


@pytest.mark.parametrize(("backward", "calls"), [(True, 2), (False, 1)], ids=["part of the step", "a trial"])
def test_a_forward_pass_before_the_optimizer_counts_if_its_gradients_arrive(backward: bool, calls: int) -> None:
    def train() -> None:
        model = net()
        early = loss_of(model, BATCHES[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = loss_of(model, BATCHES[1])
        (early + loss if backward else loss).backward()
        optimizer.step()

    record = mezzo.ranges(train, steps=1)
    assert histogram(record, "activations", "0").total == calls * 8 * 16


@BOTH_WAYS
def test_mixed_precision_that_began_before_is_off_inside_and_on_again_afterwards() -> None:
    records = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    for amp in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(model: nn.Module = model, optimizer: Any = optimizer, amp: bool = amp) -> None:
            for x in BATCHES[:3]:
                optimizer.zero_grad()
                if amp:
                    with region:
                        loss = loss_of(model, x)
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss_of(model, x).backward()
                    optimizer.step()

        if amp:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                records.append(mezzo.ranges(train))
                assert model(BATCHES[0]).dtype is torch.bfloat16
        else:
            records.append(mezzo.ranges(train))
    assert records[0].tensors == records[1].tensors
    assert records[0].updates == records[1].updates
    assert (scaler.is_enabled(), scaler.get_scale()) == (True, 2.0**15)
    with region:
        assert model(BATCHES[0]).dtype is torch.bfloat16


def test_an_empty_window_names_the_tensors_at_both_ends() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"loud": nn.Linear(4, 4), "quiet": nn.Linear(4, 64)})

    def loss(_: nn.Module, x: Tensor) -> Tensor:
        outputs = {name: layer(x[:, :4]) for name, layer in model.items()}
        both: Tensor = outputs["loud"].sum() * 2e4 + outputs["quiet"].pow(2).mean() * 1e-9
        return both

    record = mezzo.ranges(lambda: plain(model, still(model), 2, loss))
    window = record.windows[0]
    assert window.format == "fp16"
    assert window.empty
    assert window.suggested is None
    assert window.highest is not None
    assert all(name.startswith("Linear.") or "Linear (" in name for name in window.at_top)
    assert "Linear#2" in window.at_bottom[0]
    assert window.lost > record.little
    assert not record.windows[1].empty  # bf16


def test_modules_that_the_policy_keeps_in_fp32_set_no_limit() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.body(x) * 1e-8).sum() * 1e8
            return y

    torch.manual_seed(1)
    model = Two()

    def train() -> None:
        plain(model, still(model), 2, lambda model, x: model(x))  # type: ignore[no-any-return]

    free, kept = mezzo.ranges(train), mezzo.ranges(train, policy="fp16:fp32_modules=head")
    assert {t.name for t in kept.tensors if t.kept_fp32} >= {"head.0", "head.1", "head.0.weight", "head.1.bias"}
    assert not any(t.kept_fp32 for t in kept.tensors if t.name.startswith("body") or t.name == "Two (input)")
    assert {t.name for t in free.tensors if t.kept_fp32} == {"Two"}  # a sum is FP32 by the op lists
    assert not any("every gradient" in window.reason for window in (*free.windows, *kept.windows))
    highest = [record.windows[0].highest for record in (free, kept)]
    assert highest[0] is not None
    assert highest[1] is not None
    assert highest[0] < 0 < highest[1]
    assert all(name.startswith("body") for name in kept.windows[0].at_top)


def note(record: RangesRecord, what: str) -> str:
    return " ".join(f"{n.value}; {n.reason}" for n in record.notes if n.what == what)


def test_notes_say_what_a_loss_scale_cannot_help_and_where_the_policy_begins_wrongly() -> None:
    model = net()

    def train(factor: float) -> None:
        plain(model, still(model), 2, lambda model, x: loss_of(model, x * 1e6) * factor)

    record = mezzo.ranges(lambda: train(1.0))
    assert "0 (up to 2^" in note(record, "forward overflow")
    assert "beyond fp16's 65504" in note(record, "forward overflow")
    assert note(mezzo.ranges(lambda: train(1.0), policy="bf16"), "forward overflow") == ""
    assert "65536 overflows; the window ends at" in note(record, "policy's loss scale")
    quiet = mezzo.ranges(lambda: train(1e-17), policy="fp16:init_scale=2")
    assert "2 is too small; the window begins at" in note(quiet, "policy's loss scale")
    lowest = existing(mezzo.ranges(lambda: train(1e-10)).windows[0].lowest)
    assert 1 < lowest < 24
    fits = mezzo.ranges(lambda: train(1e-10), policy=f"fp16:init_scale={2.0**lowest}")
    assert note(fits, "policy's loss scale") == ""
    endless = nn.Sequential(nn.Linear(6, 4), _Endless(), nn.Hardtanh())
    broken = mezzo.ranges(lambda: plain(endless, torch.optim.SGD(endless.parameters())))
    assert "in FP32 already: 1 (activations)" in note(broken, "not finite")


class _Endless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + float("inf")


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(SessionError, match="steps=0"):
        mezzo.ranges(lambda: None, steps=0)
    with pytest.raises(SessionError, match=r"ranges\(train=3, steps=20\): train is a function without arguments"):
        mezzo.ranges(3)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="fp61"):
        mezzo.ranges(lambda: None, policy="fp61")
    with pytest.raises(ScriptError, match="without a training step"):
        mezzo.ranges(lambda: None)


@BOTH_WAYS
def test_an_error_of_the_function_comes_out_and_nothing_stays_patched() -> None:
    backward = torch.autograd.backward

    def train() -> None:
        plain(net(), torch.optim.SGD(net().parameters()), 1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mezzo.ranges(train)
    assert torch.autograd.backward is backward
    assert "_enabled" not in vars(torch.amp.GradScaler)


# --- scripts ---------------------------------------------------------------------------------------------------------------------


def of_script(name: str, *words: str, steps: int = 3) -> RangesRecord:
    """Run ``tests/scripts/<name>.py`` in this process as the command's child does."""
    path = str(SCRIPTS / f"{name}.py")
    wanted = RangesSettings(steps=tuple(range(1, steps + 1)))
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        run, _ = stack.enter_context(switched(Policy.parse("fp32"), observe=wanted))
        stack.enter_context(as_script(path, words))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.suppress(SystemExit))
        runpy.run_path(path, run_name="__main__")
    assert run.listeners.observer is not None
    record = run.listeners.observer.record(build.run_record("fp32", num_steps=steps))
    assert isinstance(record, RangesRecord)
    return record


def values(record: RangesRecord) -> dict[tuple[str, str], Histogram]:
    return {(t.kind, t.name): t.histogram for t in record.tensors}


@BOTH_WAYS
def test_checkpointing_counts_everything_once() -> None:
    found = [
        values(of_script("checkpointing", *way)) for way in (("none", "x"), ("module", "x"), ("module", "reentrant"))
    ]
    assert found[0] == found[1] == found[2]
    assert found[0]["activations", "blocks.0.0.0"].total == 3 * 8 * 32


SCRIPTS_RUN: list[tuple[list[str], str, int, str]] = [
    # words, a tensor, its number of values in three steps, a note
    (["plain"], "0.weight", 3 * 96, ""),
    (["workers", "fork"], "0.weight", 3 * 96, ""),
    (["own_amp", "new", "65536"], "0.weight", 3 * 96, ""),
    (["compiled", "module", "eager"], "0.weight", 3 * 96, "compiled code ran eagerly in the observed steps"),
    (["compiled", "in-place", "eager"], "0.weight", 3 * 96, "compiled code ran eagerly in the observed steps"),
    (["compiled", "function", "eager"], "0.weight", 3 * 96, "compiled code ran eagerly in the observed steps"),
    (["compiled", "update", "eager"], "0.weight", 3 * 96, "compiled code ran eagerly in the observed steps"),
    (["gan"], "Sequential#2.0.weight", 3 * 32, ""),  # a step of the generator gives the discriminator gradients too
    (["tied", "sparse"], "embed.weight", 3 * 88, ""),  # the rows that a batch used
    (["by_hand", "grad"], "0.weight", 3 * 96, "updates by hand are not seen"),
    (["closures", "lbfgs"], "0.weight", 9 * 96, ""),  # three evaluations a step
]


@BOTH_WAYS
@pytest.mark.parametrize(("words", "name", "count", "said"), SCRIPTS_RUN)
def test_hard_scripts(words: list[str], name: str, count: int, said: str) -> None:
    record = of_script(*words)
    assert record.steps_watched == [1, 2, 3]
    assert histogram(record, "weight gradients", name).total == count
    assert said in " ".join(f"{n.value} {n.reason}" for n in record.notes)
    assert said or not [n for n in record.notes if n.what in ("updates", "activations", "torch.compile")]


def test_code_that_is_compiled_after_an_observation_runs_compiled() -> None:
    # The compiler is imported before the script imports it, as in a notebook.
    from torch._dynamo.testing import CompileCounter

    of_script("compiled", "module", "eager")
    counted = CompileCounter()
    torch.compile(torch.sin, backend=counted)(torch.ones(3))
    assert counted.frame_count == 1


def test_every_optimizer_s_updates_are_counted() -> None:
    record = of_script("two_optimizers")
    names = {t.name for t in record.tensors if t.kind == "weights"}
    assert {t.name for t in record.tensors if t.kind == "updates"} == names
    assert {n.partition(".")[0] for n in names} == {"Sequential", "Sequential#2"}
    assert all(histogram(record, "weights", n).total == histogram(record, "updates", n).total for n in names)


# --- the command -----------------------------------------------------------------------------------------------------------------


def test_the_command_runs_a_script_unedited_and_leaves_a_record_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["ranges", "--json", "--steps", "2", "--policy", "fp16:init_scale=1024", "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["mezzo", *words, str(SCRIPTS / "plain.py")])
    with children_in_this_process():
        assert cli.main(sys.argv[1:]) == 0
    done = capsys.readouterr()
    record = record_at(tmp_path / "out" / "record.json", RangesRecord)
    assert RangesRecord.model_validate_json(done.out) == record
    assert (record.steps_watched, record.policy, record.run.policy) == ([1, 2], "fp16:init_scale=1024", "fp32")
    assert record.run.command == ["mezzo", *words, str(SCRIPTS / "plain.py")]
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000


@pytest.mark.slow
def test_two_processes_of_a_distributed_run_have_one_record_of_all_their_values(tmp_path: Path) -> None:
    words = ["ranges", "--steps", "3", "--out", "out", str(SCRIPTS / "ranks.py"), "ddp", "3"]
    ended = in_forks(words, folder=tmp_path)
    assert [one.code for one in ended] == [0, 0], ended
    record = record_at(tmp_path / "out" / "record.json", RangesRecord)
    found = values(record)
    assert found["weight gradients", "0.weight"].total == 2 * 3 * 16 * 32  # of two ranks, in three steps
    assert found["activations", "0"].total == 2 * 3 * 8 * 32


PLAIN = str(SCRIPTS / "plain.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.py"], "there is no script 'nothing.py'"),
        (["--policy", "fp61", PLAIN], "unknown policy 'fp61'; did you mean fp16"),
        (["--steps", "0", PLAIN], "--steps"),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ranges", *words]) == 2
    assert said in re.sub(r"[\s│]+", " ", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_never_trains_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('nothing to do')\n")
    with children_in_this_process():
        assert cli.main(["ranges", "--out", str(tmp_path / "out"), str(script)]) == 7
    printed = capfd.readouterr()
    assert "it never called backward()" in re.sub(r"\s+", " ", printed.err)
    assert "idle.py failed before a step could be recorded" in printed.out


@BOTH_WAYS
def test_values_inside_transforms_are_counted() -> None:
    """A loss of four tasks, each adapted by a gradient of its own: all tasks count."""
    model = nn.Sequential(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss_of_task(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, weights, (x,)).pow(2).mean()
        return loss

    def adapted(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        found = torch.func.grad(loss_of_task)(weights, x)
        return loss_of_task({name: w - 0.1 * found[name] for name, w in weights.items()}, x)

    def train() -> None:
        for step in range(3):
            tasks = torch.stack(BATCHES[4 * step : 4 * step + 4])
            optimizer.zero_grad()
            torch.vmap(adapted, in_dims=(None, 0))(dict(model.named_parameters()), tasks).mean().backward()
            optimizer.step()

    record = mezzo.ranges(train, steps=3)
    assert histogram(record, "activations", "0").total == 3 * 2 * 4 * 8 * 4  # steps, calls, tasks, samples, outputs
    assert histogram(record, "weight gradients", "0.weight").total == 3 * 24
