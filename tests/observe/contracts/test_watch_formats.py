"""What a contract finds in runs: a planted format in each role, with its module, tensor, moment, step and line, and the healthy twin."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers_launch import AS_IS, as_script, run_record
from mezzo.errors import ScriptError
from mezzo.launch.torch import switched
from mezzo.observe.contracts.contract import Contract, breaches, contract_of, written
from mezzo.observe.settings import AuditSettings, StopScript
from mezzo.policy import Policy
from mezzo.records import AuditRecord, CheckedContract
from paths import SCRIPTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = SCRIPTS / "contract_cases.py"


def checked(
    script: Callable[[], object], contract: Contract | None = None, policy: str | None = None
) -> CheckedContract:
    """Return what was found in a run of ``script``."""
    settings = AuditSettings(steps=(2,), contract=contract or Contract())
    chosen = None if policy is None else Policy.parse(policy)
    with switched(chosen, observe=settings) as (run, _), contextlib.suppress(StopScript):
        script()
    observer = run.listeners.observer or run.listeners.retired
    assert observer is not None
    record = observer.record(run_record(policy or AS_IS))
    assert isinstance(record, AuditRecord)
    assert record.contract is not None
    return record.contract


def of_script(
    path: Path, *arguments: str, contract: Contract | None = None, policy: str | None = None
) -> CheckedContract:
    def script() -> None:
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(path), run_name="__main__")

    with as_script(str(path), arguments), contextlib.redirect_stdout(io.StringIO()):
        return checked(script, contract, policy)


def keeps_what_it_writes(found: CheckedContract) -> bool:
    return breaches(contract_of(tomllib.loads(written(found.formats, title="t"))), found.formats) == []


def planted_line(role: str) -> str:
    lines = CASES.read_text(encoding="utf-8").splitlines()
    numbers = [n for n, line in enumerate(lines, 1) if role in line.partition("# PLANTED")[2].split()]
    return f"{CASES}:{numbers[0]}" if numbers else ""  # copies that the script makes itself


EVERY_WEIGHT = [("0", "weight"), ("0", "bias"), ("1", "scale"), ("2", "weight"), ("2", "bias")]

PLANTED = {
    # case: role, tensors with a wrong format, what is found, moment, step
    "weights": ("weights", EVERY_WEIGHT[3:], "bf16", "set-up", 1),
    "buffers": ("buffers", [("1", "mean")], "bf16", "set-up", 1),
    "gradients": ("gradients", [("2", "weight")], "bf16", "first update", 1),
    "copies": ("master_weights", EVERY_WEIGHT, "bf16", "first update", 1),
    "master_weights": ("master_weights", EVERY_WEIGHT, "bf16", "first update", 1),
    "optimizer_state": ("optimizer_state", [(m, f"{t}.momentum") for m, t in EVERY_WEIGHT], "bf16", "first update", 1),
    "rounding": (
        "optimizer_state",
        [("0", "weight.momentum")],  # the others have too few numbers to tell
        "bf16 in fp32",
        "third update",
        3,
    ),
    "resume": ("optimizer_state", [(m, f"{t}.exp_avg") for m, t in EVERY_WEIGHT], "bf16", "resume", 2),
    "ema": ("ema", EVERY_WEIGHT, "bf16", "first update", 1),
    "activations": ("activations", [("1", "")], "bf16", "first update", 1),
    "checkpoints": (
        "checkpoints",
        [(f"model.{m}", t) for m, t in [*EVERY_WEIGHT[:3], ("1", "mean"), *EVERY_WEIGHT[3:]]],
        "bf16",
        "save",
        4,
    ),
    "state_in_a_file": ("checkpoints", [(f"optimizer.state.{n}", "momentum") for n in range(5)], "bf16", "save", 2),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_format_is_found_and_its_healthy_twin_is_not(case: str) -> None:
    role, tensors, form, moment, step = PLANTED[case]
    contract = contract_of({role: {"*": "fp32"}})
    found = of_script(CASES, case, "planted", contract=contract)
    assert [
        (b.problem, b.role, b.module, b.tensor, b.expected, b.found, b.moment, b.step, b.line) for b in found.breaches
    ] == [
        ("format", role, module, tensor, ["fp32"], [form], moment, step, planted_line(case))
        for module, tensor in tensors
    ]
    assert keeps_what_it_writes(found)
    healthy = of_script(CASES, case, "healthy", contract=contract)
    assert healthy.breaches == []
    assert keeps_what_it_writes(healthy)


ROUND_TRIPS = [
    ("plain.py", (), None),
    ("plain.py", (), "bf16"),
    ("plain.py", (), "bf16-pure"),
    ("plain.py", (), "fp16-master"),
    ("own_amp.py", ("new", "1024"), None),
    ("gan.py", (), None),
    ("recurrent.py", (), "fp16"),
    ("tied.py", ("sparse",), None),
    ("two_optimizers.py", (), None),
    ("by_hand.py", ("sgd",), None),
]


@pytest.mark.parametrize(("script", "arguments", "policy"), ROUND_TRIPS)
def test_a_script_keeps_the_contract_that_is_written_of_it(
    script: str, arguments: tuple[str, ...], policy: str | None
) -> None:
    first = of_script(SCRIPTS / script, *arguments, policy=policy)
    text = written(first.formats, title=script)
    assert len(text.splitlines()) <= 30
    again = of_script(SCRIPTS / script, *arguments, contract=contract_of(tomllib.loads(text)), policy=policy)
    assert again.breaches == []


# --- the moments -----------------------------------------------------------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).float().square().mean().backward()
    optimizer.step()


def trains(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        step(model, optimizer)


def by_moment(found: CheckedContract, role: str) -> list[tuple[str, list[str], str, int]]:
    return [(one.name, one.formats, one.moment, one.step) for one in found.formats if one.role == role]


def test_a_state_that_changes_later_is_found_at_the_end() -> None:
    def script() -> None:
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trains(model, optimizer, 6)
        optimizer.state[model[0].weight]["momentum_buffer"] = torch.zeros(1, 4, dtype=torch.float64)

    found = by_moment(checked(script), "optimizer_state")
    assert found == [
        ("0.weight.momentum_buffer", ["fp32"], "first update", 1),
        ("0.weight.momentum_buffer", ["fp64"], "end", 6),
    ]


def test_a_model_that_a_function_drops_is_read_at_the_end() -> None:
    def main() -> None:
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        trains(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        model.double()

    assert by_moment(checked(main), "weights") == [
        ("0.weight", ["fp32"], "set-up", 1),
        ("0.weight", ["fp64"], "end", 2),
    ]


def test_two_trainings_one_after_the_other_are_both_read() -> None:
    def script() -> None:
        for form, key in ((torch.float32, "momentum_buffer"), (torch.float64, "exp_avg")):
            model = nn.Sequential(nn.Linear(4, 1, bias=False)).to(form)
            optimizer = (torch.optim.SGD if key == "momentum_buffer" else torch.optim.Adam)(model.parameters(), lr=0.1)
            optimizer.param_groups[0].update({"momentum": 0.9} if key == "momentum_buffer" else {})
            model.register_forward_pre_hook(lambda _, args, form=form: (args[0].to(form),))
            trains(model, optimizer, 2)

    found = by_moment(checked(script), "optimizer_state")
    assert [one[:2] for one in found] == [
        ("0.weight.momentum_buffer", ["fp32"]),
        ("0.weight.exp_avg", ["fp64"]),
        ("0.weight.exp_avg_sq", ["fp64"]),
    ]


def test_after_a_load_everything_is_read_again() -> None:
    def script() -> None:
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trains(model, optimizer, 5)
        model.double().register_forward_pre_hook(lambda _, args: (args[0].double(),))
        model.load_state_dict(model.state_dict())
        trains(model, optimizer, 2)

    found = checked(script)
    assert by_moment(found, "weights") == [("0.weight", ["fp32"], "set-up", 1), ("0.weight", ["fp64"], "resume", 6)]
    assert by_moment(found, "activations")[2:] == [
        ("0", ["fp64"], "resume", 6),
        ("Sequential", ["fp64"], "resume", 6),
    ]


@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16])
def test_a_state_that_a_new_process_loads_is_read_as_it_was_saved(form: torch.dtype) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    trains(model, optimizer, 1)
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].to(form)

    def resumed() -> None:
        model, optimizer = made()
        optimizer.load_state_dict(saved)  # before the first call: torch casts the state to the weights' format
        trains(model, optimizer, 2)

    found = by_moment(checked(resumed), "optimizer_state")
    was = {torch.float32: [], torch.bfloat16: [("0.weight.momentum_buffer", ["bf16"], "resume", 0)]}[form]
    assert found == [*was, ("0.weight.momentum_buffer", ["fp32"], "resume", 0)]


def test_a_part_that_is_first_called_later_has_its_own_name() -> None:
    def script() -> None:
        model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4)), "b": nn.Sequential(nn.Linear(4, 1))})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parts in ("a", "ab", "ab"):
            x = torch.ones(2, 4)
            for part in parts:
                x = model[part](x)
            x.sum().backward()
            optimizer.step()

    names = {name for name, *_ in by_moment(checked(script), "weights")}
    assert names == {f"{root}.0.{kind}" for root in ("Sequential", "Sequential#2") for kind in ("weight", "bias")}


def test_weights_that_are_loaded_at_the_end_do_not_hide_it() -> None:
    def script() -> None:
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        trains(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
        model.double().load_state_dict(model.state_dict())

    assert by_moment(checked(script), "weights")[-1] == ("0.weight", ["fp64"], "end", 3)


def test_a_weight_outside_the_model_is_no_master_of_a_weight_that_is_trained() -> None:
    def script() -> None:
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        scale = torch.ones(1, 4, requires_grad=True)
        several = [torch.optim.SGD([weight], lr=0.1) for weight in (model[0].weight, scale)]
        for _ in range(2):
            (model(torch.ones(2, 4)).mean() * scale).sum().backward()
            for optimizer in several:
                optimizer.step()

    found = checked(script)
    assert by_moment(found, "master_weights") == []
    assert [name for name, *_ in by_moment(found, "weights")] == ["0.weight", "SGD.0.0"]


@pytest.mark.parametrize("kind", [torch.optim.Rprop, torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_state_of_gradients_that_autocast_has_rounded_is_no_rounded_state(kind: type[torch.optim.Optimizer]) -> None:
    """Rprop keeps the last gradient, and the first momentum of SGD is one."""

    def script() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
        optimizer = kind(model.parameters(), lr=0.01, **({"momentum": 0.5} if kind is torch.optim.SGD else {}))  # type: ignore[call-arg]
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(8, 16)).float().square().mean()
            loss.backward()
            assert model[0].weight.grad is not None
            assert torch.equal(model[0].weight.grad.bfloat16().float(), model[0].weight.grad)
            optimizer.step()

    assert {tuple(formats) for _, formats, _, _ in by_moment(checked(script), "optimizer_state")} == {("fp32",)}


def test_arguments_may_be_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name="weight", param=nn.Parameter(torch.ones(4)))
            self.register_buffer(name="mean", tensor=torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.mean

    def script() -> None:
        model = nn.Sequential(Own())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trains(model, optimizer, 2)
        model.load_state_dict(state_dict=model.state_dict())
        optimizer.load_state_dict(state_dict=optimizer.state_dict())
        torch.save(obj={"model": model.state_dict()}, f=io.BytesIO())

    found = checked(script)
    assert {
        (one.role, one.name): one.moment for one in found.formats if one.role in ("weights", "buffers", "checkpoints")
    } == {
        ("weights", "0.weight"): "set-up",
        ("buffers", "0.mean"): "set-up",
        ("checkpoints", "model.0.weight"): "save",
        ("checkpoints", "model.0.mean"): "save",
    }
    assert all(one.line for one in found.formats if one.role in ("weights", "buffers"))


def test_a_line_that_was_not_seen_is_empty() -> None:
    def script() -> None:
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        model[0].weight.data = model[0].weight.data.bfloat16()
        model.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        trains(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)

    (one,) = [one for one in checked(script).formats if one.role == "weights"]
    assert (one.formats, one.line) == (["bf16"], "")


def test_a_skipped_update_is_not_the_first() -> None:
    def script() -> None:
        model = nn.Sequential(nn.Linear(4, 1, bias=False))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for scale in (1e30, 1.0, 1.0):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).square().mean() * scale).backward()
            optimizer.step()

    found = by_moment(checked(script, policy="fp16"), "optimizer_state")
    assert {(moment, number) for _, _, moment, number in found} == {("first update", 2)}


def test_what_a_compiled_model_returns_is_unknown() -> None:
    def script() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        compiled = torch.compile(model, backend="eager")
        trains(compiled, torch.optim.SGD(model.parameters(), lr=0.1), 1)

    found = checked(script, contract_of({"activations": "fp32", "weights": "fp32"}))
    assert [(b.problem, b.role) for b in found.breaches] == [("unknown", "activations")]


def test_an_emulated_world_has_no_exchanges_to_check() -> None:
    with pytest.raises(ScriptError, match=r"\[reduction\], and policy .* emulates 8 processes"):
        checked(lambda: None, contract_of({"reduction": "bf16"}), policy="bf16:world=8:reduce=bf16")


def test_nothing_is_left_behind() -> None:
    before = [
        (nn.Module, n, vars(nn.Module)[n])
        for n in ("register_parameter", "register_buffer", "_apply", "load_state_dict")
    ]
    before += [(torch.optim.Optimizer, n, vars(torch.optim.Optimizer)[n]) for n in ("__init__", "load_state_dict")]
    saves = torch.save
    of_script(CASES, "weights", "planted")
    assert [vars(owner)[name] is value for owner, name, value in before] == [True] * len(before)
    assert torch.save is saves
    assert not torch.nn.modules.module._global_forward_hooks
