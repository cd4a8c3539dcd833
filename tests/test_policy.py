"""Policies: texts and files in and out, wrong ones, and what a policy does on a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.devices import Device
from mezzo.errors import PolicyError, UnsupportedFormatError
from mezzo.formats import BF16, E2M1, E4M3, E5M2, FP16, FP32, TF32, Format
from mezzo.oplists import FAMILIES, python_name
from mezzo.policy import POLICY_ALIASES, PRESETS, Policy

# --- what the presets are ------------------------------------------------------------------------

PRESET_FIELDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"compute": "tf32"},
    "fp16": {"compute": "fp16", "casting": "ops", "loss_scale": "dynamic"},
    "bf16": {"compute": "bf16", "casting": "ops"},
    "fp16-master": {
        "compute": "fp16",
        "casting": "model",
        "master_weights": True,
        "loss_scale": "dynamic",
    },
    "bf16-master": {"compute": "bf16", "casting": "model", "master_weights": True},
    "fp16-pure": {"compute": "fp16", "casting": "model", "norms": "compute"},
    "bf16-pure": {"compute": "bf16", "casting": "model", "norms": "compute"},
    "fp8": {"compute": "fp8", "casting": "ops"},
    "fp8-block": {"compute": "fp8", "casting": "ops", "fp8_recipe": "blockwise"},
    "mxfp8": {"compute": "mxfp8", "casting": "ops"},
    "mxfp4": {"compute": "mxfp4", "casting": "ops"},
    "nvfp4": {"compute": "nvfp4", "casting": "ops"},
}
DEFAULTS: dict[str, Any] = {
    "compute": "fp32",
    "casting": "none",
    "norms": "fp32",
    "master_weights": False,
    "loss_scale": "none",
    "init_scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "hysteresis": 1,
    "min_scale": 5.960464477539063e-08,
    "max_scale": 16777216.0,
    "arithmetic": "auto",
    "op_lists": "portable",
    "fp8_recipe": "tensorwise",
    "fp8_formats": "ocp",
    "scale_rule": "auto",
    "weight_blocks": "auto",
    "hadamard": "auto",
    "gradient_rounding": "auto",
    "end_layers": "bf16",
    "bf16_products": (),
    "accumulate": "fp32",
    "gradients": "auto",
    "reduce": "auto",
    "gather": "auto",
    "world": 1,
    "reduce_order": "ring",
    "lower": (),
    "fp32": (),
    "widest": (),
    "fp32_modules": (),
}
FORMATS_OF: dict[str, tuple[Format, tuple[Format, ...]]] = {
    # stored in, computed in
    "fp32": (FP32, (FP32,)),
    "tf32": (FP32, (TF32,)),
    "fp16": (FP16, (FP16,)),
    "bf16": (BF16, (BF16,)),
    "fp8": (BF16, (E4M3, E5M2)),
    "mxfp8": (BF16, (E4M3, E4M3)),
    "mxfp4": (BF16, (E2M1, E2M1)),
    "nvfp4": (BF16, (E2M1, E2M1)),
}


@pytest.mark.parametrize("name", PRESET_FIELDS)
def test_preset(name: str) -> None:
    policy = Policy.parse(name)

    assert dataclasses.asdict(policy) == {"name": name, **DEFAULTS, **PRESET_FIELDS[name]}
    assert str(policy) == name
    elements = tuple(dataclasses.replace(fmt, scaling=None) for fmt in policy.required_formats)
    stored, computed = FORMATS_OF[policy.compute]
    assert (policy.storage, elements) == (stored, (E4M3, E4M3) if name == "fp8-block" else computed)
    assert policy.lowers == (name not in ("fp32", "tf32"))


def test_presets_are_those_of_the_table() -> None:
    assert list(PRESETS) == list(PRESET_FIELDS)


OTHER_NAMES = {
    "O0": "fp32",
    "O1": "fp16",
    "O2": "fp16-master",
    "O3": "fp16-pure",
    "32-true": "fp32",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
    "16-true": "fp16-pure",
    "bf16-true": "bf16-pure",
    "no": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "amp": "fp16",
    "bfloat16": "bf16",
    "mixed_float16": "fp16",
    "mixed_bfloat16": "bf16",
}


@pytest.mark.parametrize(("other", "preset"), OTHER_NAMES.items())
def test_names_of_other_libraries(other: str, preset: str) -> None:
    assert Policy.parse(other) == PRESETS[preset]
    assert str(Policy.parse(f"{other}:growth_interval=7")) == f"{preset}:growth_interval=7"


@pytest.mark.parametrize("text", ["FP16", "Fp16:growth_interval=7", "BFloat16", "o2"])
def test_case_does_not_matter(text: str) -> None:
    assert Policy.parse(text) == Policy.parse(text.lower().replace("o2", "O2"))


def test_every_alias_has_a_row() -> None:
    assert set(POLICY_ALIASES) == set(OTHER_NAMES) - set(PRESET_FIELDS)


# --- texts and files in and out ------------------------------------------------------------------

CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("init_scale=1024", {"init_scale": 1024.0}),
    ("init_scale=1024", {"init_scale": 1024}),
    ("growth_factor=1.5", {"growth_factor": 1.5}),
    ("backoff_factor=0.25", {"backoff_factor": 0.25}),
    ("growth_interval=7", {"growth_interval": 7}),
    ("hysteresis=3", {"hysteresis": 3}),
    ("min_scale=1:max_scale=1e+20", {"min_scale": 1.0, "max_scale": 1e20}),
    ("min_scale=1e-06", {"min_scale": 1e-6}),
    ("op_lists=device", {"op_lists": "device"}),
    ("arithmetic=native", {"arithmetic": "native"}),
    ("reduce=fp16", {"reduce": "fp16"}),
    ("reduce=bf16:world=384", {"reduce": "bf16", "world": 384}),
    ("reduce=fp32:world=8:reduce_order=tree", {"reduce": "fp32", "world": 8, "reduce_order": "tree"}),
    ("gather=fp32", {"gather": "fp32"}),
    ("loss_scale=static", {"loss_scale": "static"}),
    ("lower=layer_norm+gelu", {"lower": ("layer_norm", "gelu")}),
    ("fp32=bmm:widest=add", {"widest": ("add",), "fp32": ("bmm",)}),
    ("fp32_modules=head.*+norm?", {"fp32_modules": ("head.*", "norm?")}),
    ("fp32_modules=a=b", {"fp32_modules": ("a=b",)}),
]


@pytest.mark.parametrize("name", PRESET_FIELDS)
@pytest.mark.parametrize(("text", "fields"), CHANGED, ids=[text for text, _ in CHANGED])
def test_text_and_file_of_changed_fields(name: str, text: str, fields: dict[str, Any], tmp_path: Path) -> None:
    policy = PRESETS[name].replace(**fields)

    assert {f: getattr(policy, f) for f in fields} == fields
    assert dataclasses.replace(policy, **{f: getattr(PRESETS[name], f) for f in fields}) == (PRESETS[name])
    assert str(policy) == f"{name}:{text}"
    assert Policy.parse(str(policy)) == policy
    path = tmp_path / "policy.toml"
    path.write_text(policy.to_toml(), encoding="utf-8")
    assert Policy.load(path) == policy


def test_switches_that_depend_on_the_preset() -> None:
    assert str(PRESETS["fp16"].replace(loss_scale="none")) == "fp16:loss_scale=none"
    assert str(PRESETS["fp16-master"].replace(master_weights=False)) == ("fp16-master:master_weights=false")
    assert str(PRESETS["bf16-pure"].replace(master_weights=True)) == "bf16-pure:master_weights=true"
    for text in ("fp16-master:master_weights=false", "bf16-pure:master_weights=true"):
        assert str(Policy.parse(text)) == text


def test_spaces_around_the_parts_do_not_matter() -> None:
    assert Policy.parse(" O1 : init_scale = 8 ") == PRESETS["fp16"].replace(init_scale=8)


FAMILY_LISTS = ("lower", "fp32", "widest")


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Draw any valid policy."""
    scales = st.floats(2.0**-100, 2.0**100) | st.integers(1, 2**53)
    low, high = sorted((draw(scales), draw(scales)))
    casting = draw(st.sampled_from(["none", "ops", "model"]))
    compute = draw(st.sampled_from(["fp32", "tf32"] if casting == "none" else ["fp16", "bf16", "fp8"]))
    ways = [("portable", a) for a in ("auto", "native", "emulated")]
    ways += [("device", a) for a in ("auto", "native")]
    op_lists, arithmetic = draw(st.sampled_from(ways))
    emulated_fp8 = compute == "fp8" and op_lists == "portable" and arithmetic != "native"
    lists: dict[str, list[str]] = {name: [] for name in FAMILY_LISTS}
    for family in draw(st.lists(st.sampled_from(FAMILIES), unique=True, max_size=4)):
        names = [family.name, *(python_name(op) for op in family.ops)]
        lists[draw(st.sampled_from(FAMILY_LISTS))].append(draw(st.sampled_from(names)))
    characters = st.characters(codec="utf-8").filter(lambda c: c.isprintable() and c not in ":+, ")
    patterns = st.lists(st.text(characters, min_size=1, max_size=8), max_size=3)
    return Policy(
        name=draw(st.sampled_from(list(PRESETS))),
        compute=compute,
        casting=casting,
        norms=draw(st.sampled_from(["fp32", "compute"])) if casting == "model" else "fp32",
        master_weights=draw(st.booleans()) and casting == "model",
        loss_scale=draw(st.sampled_from(["none", "static", "dynamic"])),
        init_scale=draw(st.floats(low, high)),
        growth_factor=draw(st.floats(1, 2.0**20)),
        backoff_factor=draw(st.floats(2.0**-20, 1)),
        growth_interval=draw(st.integers(1, 2**31 - 1)),
        hysteresis=draw(st.integers(1, 2**31 - 1)),
        min_scale=low,
        max_scale=high,
        op_lists=op_lists,
        fp8_recipe=draw(st.sampled_from(["tensorwise", "rowwise"])) if compute == "fp8" else "tensorwise",
        accumulate=draw(st.sampled_from(["fp32", "fp22", "fp22-128", "hopper"])) if emulated_fp8 else "fp32",
        gradients=draw(st.sampled_from(["auto", "bf16"])) if casting != "model" or compute != "fp16" else "auto",
        arithmetic=arithmetic,
        fp32_modules=tuple(draw(patterns)),
        **{name: tuple(names) for name, names in lists.items()},
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(policy=policies())
def test_any_policy_survives_its_text(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == policy
    assert Policy.of(str(policy)) == policy


@settings(max_examples=300, deadline=None, derandomize=True)
@given(policy=policies())
def test_any_policy_survives_its_file(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any-policy.toml"
    path.write_text(policy.to_toml(), encoding="utf-8")
    assert Policy.load(path) == policy


def test_to_toml_writes_what_differs_from_the_preset() -> None:
    policy = PRESETS["fp16"].replace(
        init_scale=1024.0, growth_interval=50, fp32_modules=("head.*", 'a"b\\c'), fp32=("bmm",)
    )
    assert policy.to_toml() == (
        'policy = "fp16"\n'
        "init_scale = 1024.0\n"
        "growth_interval = 50\n"
        'fp32 = ["bmm"]\n'
        'fp32_modules = ["head.*", "a\\"b\\\\c"]\n'
    )
    assert PRESETS["bf16-pure"].replace(master_weights=True).to_toml() == (
        'policy = "bf16-pure"\nmaster_weights = true\n'
    )


FILES = [
    ('policy = "O2"\nhysteresis = 2\n', "fp16-master:hysteresis=2"),
    ('policy = "bf16:growth_interval=5"\nfp32_modules = ["head"]\n', "bf16:growth_interval=5"),
    ("growth_interval = 9\n", "fp32:growth_interval=9"),
    ("", "fp32"),
]


@pytest.mark.parametrize(("text", "start"), FILES)
def test_load(text: str, start: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text, encoding="utf-8")
    loaded = Policy.load(str(path))
    wanted = Policy.parse(start)
    assert loaded == (wanted.replace(fp32_modules=("head",)) if "head" in text else wanted)
    assert Policy.of(path) == Policy.of(str(path)) == loaded


def test_of_returns_a_policy_itself() -> None:
    policy = PRESETS["fp16"].replace(hysteresis=2)
    assert Policy.of(policy) is policy


# --- wrong texts, files and fields ---------------------------------------------------------------

NAMES = (
    "fp32, tf32, fp16, bf16, fp16-master, bf16-master, fp16-pure, bf16-pure, fp8, fp8-block, mxfp8, mxfp4, nvfp4, O0, O1, O2, O3, "
    "32-true, 16-mixed, bf16-mixed, 16-true, bf16-true, no, float32, float16, half, bfloat16, amp, mixed_float16, mixed_bfloat16"
)
NAME_HINT = "name a preset, another library's name for it, or a .toml policy file"
FIELDS = (
    "compute, casting, norms, master_weights, loss_scale, init_scale, growth_factor, "
    "backoff_factor, growth_interval, hysteresis, min_scale, max_scale, arithmetic, op_lists, "
    "fp8_recipe, fp8_formats, scale_rule, weight_blocks, hadamard, gradient_rounding, end_layers, bf16_products, accumulate, "
    "gradients, reduce, gather, world, reduce_order, lower, fp32, widest, fp32_modules"
)
GATHER_HINT = (
    "sharded weights are computed with in the format in which they were gathered: choose the policy of that format"
)
FIELD_HINT = "see the fields of mezzo.Policy"
SETTING_HINT = "write name:field=value:field=value, for example fp16:init_scale=1024"
SCALE_RANGE = "allowed: a number from 7.88861e-31 to 1.26765e+30"
COUNT_RANGE = "allowed: a whole number from 1 to 2.14748e+09"
FAMILY_NAMES = ", ".join(family.name for family in FAMILIES)
OP_HINT = "name a family such as 'softmax' or an operation such as 'log_softmax'"
OF_HOPPER = "accumulate={} emulates the sums of Hopper's FP8 units, and {} contradicts it; allowed: {}"
COMBINATION_HINT = "fp32 and tf32 cast nothing (casting=none); the others cast ops or the model"

BLOCK_HINT = "leave {} out, or start from a preset that has it: {}"
PRODUCTS_ALLOWED = "allowed: a layer's name, a dot, and one of forward, dgrad, wgrad or *, under a block format"
WRONG_TEXTS = [
    # text, message, hint
    ("", f"unknown policy ''; allowed: {NAMES}", NAME_HINT),
    (
        "fp16_master",
        f"unknown policy 'fp16_master'; did you mean fp16-master or bf16-master or fp16? Allowed: {NAMES}",
        NAME_HINT,
    ),
    (
        "bf16-nomaster",
        f"unknown policy 'bf16-nomaster'; did you mean bf16-pure or fp16-pure or bf16-true? Allowed: {NAMES}",
        NAME_HINT,
    ),
    (
        "fp16:int_scale=8",
        f"a policy has no field 'int_scale'; did you mean init_scale or min_scale or max_scale? Allowed: {FIELDS}",
        FIELD_HINT,
    ),
    ("fp16:name=bf16", f"a policy has no field 'name'; allowed: {FIELDS}", FIELD_HINT),
    (
        "fp16:init_scale",
        "policy 'fp16:init_scale' has 'init_scale' where field=value is expected",
        SETTING_HINT,
    ),
    ("fp16:", "policy 'fp16:' has '' where field=value is expected", SETTING_HINT),
    (
        "fp16:hysteresis=1:hysteresis=2",
        "policy 'fp16:hysteresis=1:hysteresis=2' sets hysteresis twice; allowed: once",
        "keep one of the two",
    ),
    (
        "fp16:compute=fp64",
        "policy field compute='fp64'; did you mean fp16 or nvfp4 or mxfp4? Allowed: fp32, tf32, fp16, bf16, fp8, mxfp8, mxfp4, nvfp4",
        "set compute to one of them",
    ),
    (
        "fp16:casting=op",
        "policy field casting='op'; did you mean ops? Allowed: none, ops, model",
        "set casting to one of them",
    ),
    (
        "fp16-pure:norms=fp16",
        "policy field norms='fp16'; did you mean fp32? Allowed: fp32, compute",
        "set norms to one of them",
    ),
    (
        "fp16-pure:master_weights=yes",
        "policy field master_weights='yes'; allowed: True, False",
        "set master_weights to one of them",
    ),
    (
        "fp16-pure:master_weights=1",
        "policy field master_weights='1'; allowed: True, False",
        "set master_weights to one of them",
    ),
    (
        "fp16:loss_scale=128",
        "policy field loss_scale='128'; allowed: none, static, dynamic",
        "set loss_scale to one of them",
    ),
    (
        "fp16:arithmetic=emulate",
        "policy field arithmetic='emulate'; did you mean emulated? Allowed: auto, native, emulated",
        "set arithmetic to one of them",
    ),
    (
        "fp16:op_lists=cpu",
        "policy field op_lists='cpu'; allowed: portable, device",
        "set op_lists to one of them",
    ),
    (
        "fp8:fp8_recipe=rowise",
        "policy field fp8_recipe='rowise'; did you mean rowwise or blockwise or tensorwise? Allowed: tensorwise, rowwise, blockwise",
        "set fp8_recipe to one of them",
    ),
    (
        "bf16:fp8_recipe=rowwise",
        "fp8_recipe=rowwise and compute=bf16 contradict each other",
        "leave fp8_recipe out, or start from the preset fp8",
    ),
    (
        "fp16:init_scale=0",
        f"policy field init_scale=0.0; {SCALE_RANGE}",
        "choose init_scale inside that range",
    ),
    (
        "fp16:init_scale=inf",
        f"policy field init_scale=inf; {SCALE_RANGE}",
        "choose init_scale inside that range",
    ),
    (
        "fp16:init_scale=nan",
        f"policy field init_scale=nan; {SCALE_RANGE}",
        "choose init_scale inside that range",
    ),
    (
        "fp16:init_scale=true",
        f"policy field init_scale='true'; {SCALE_RANGE}",
        "choose init_scale inside that range",
    ),
    (
        "fp16:init_scale=2**16",
        f"policy field init_scale='2**16'; {SCALE_RANGE}",
        "choose init_scale inside that range",
    ),
    (
        "fp16:growth_factor=0.5",
        "policy field growth_factor=0.5; allowed: a number from 1 to 1.04858e+06",
        "choose growth_factor inside that range",
    ),
    (
        "fp16:backoff_factor=2",
        "policy field backoff_factor=2.0; allowed: a number from 9.53674e-07 to 1",
        "choose backoff_factor inside that range",
    ),
    (
        "fp16:growth_interval=0",
        f"policy field growth_interval=0; {COUNT_RANGE}",
        "choose growth_interval inside that range",
    ),
    (
        "fp16:growth_interval=1.5",
        f"policy field growth_interval='1.5'; {COUNT_RANGE}",
        "choose growth_interval inside that range",
    ),
    (
        "fp16:hysteresis=-1",
        f"policy field hysteresis=-1; {COUNT_RANGE}",
        "choose hysteresis inside that range",
    ),
    (
        "fp16:min_scale=4:max_scale=2",
        "min_scale=4 is above max_scale=2",
        "the floor of the loss scale must not be above its ceiling",
    ),
    (
        "fp16:fp32=softmax:lower=log_softmax",
        "operation log_softmax is in the lists 'lower' and 'fp32'",
        "leave 'softmax' in one of the lists lower, fp32, widest",
    ),
    (
        "fp16:fp32=sofmax",
        "unknown operation or family 'sofmax'; did you mean softmax or log_softmax? "
        f"Allowed: {FAMILY_NAMES}, and the operations in them",
        OP_HINT,
    ),
    (
        "fp16:fp32_modules=a b",
        "policy field fp32_modules=('a b',); allowed: names without any of ':+, '",
        "write fp32_modules=name+name in a text, a list of strings in a file or in Python",
    ),
    ("fp16:compute=fp32", "compute=fp32 and casting=ops contradict each other", COMBINATION_HINT),
    ("fp16:casting=none", "compute=fp16 and casting=none contradict each other", COMBINATION_HINT),
    (
        "fp32:casting=model",
        "compute=fp32 and casting=model contradict each other",
        COMBINATION_HINT,
    ),
    (
        "bf16:accumulate=fp22",
        OF_HOPPER.format("fp22", "compute=bf16", "compute=fp8"),
        "write fp8:accumulate=fp22, or leave accumulate out",
    ),
    (
        "fp8-block:accumulate=fp22",
        "accumulate=fp22 under policy fp8-block; allowed by blocks: fp32, fp22-128",
        "a block's scale is applied where its sum is added to one in FP32, so sums are promoted after every block",
    ),
    (
        "mxfp8:accumulate=fp22",
        OF_HOPPER.format("fp22", "compute=mxfp8", "compute=fp8"),
        "write fp8:accumulate=fp22, or leave accumulate out",
    ),
    (
        "fp8:accumulate=hopper:arithmetic=native",
        OF_HOPPER.format("hopper", "arithmetic=native", "arithmetic=auto or emulated"),
        "write fp8:accumulate=fp22, or leave accumulate out",
    ),
    (
        "fp8:accumulate=fp22-128:fp8_formats=fnuz",
        OF_HOPPER.format("fp22-128", "fp8_formats=fnuz", "fp8_formats=ocp"),
        "write fp8:accumulate=fp22, or leave accumulate out",
    ),
    (
        "fp8:accumulate=fp22:op_lists=device",
        OF_HOPPER.format("fp22", "op_lists=device", "op_lists=portable"),
        "write fp8:accumulate=fp22, or leave accumulate out",
    ),
    (
        "fp16-pure:gradients=bf16",
        "gradients=bf16 and policy fp16-pure contradict each other: its gradients are in fp16",
        "leave gradients out, or choose a preset that keeps weights in FP32",
    ),
    (
        "bf16:world=384",
        "world=384 emulates a reduction, and reduce=auto names no format for it",
        "name the format: reduce=bf16:world=384, or leave world out",
    ),
    (
        "bf16:reduce=bf16:world=0",
        "policy field world=0; allowed: a whole number from 1 to 1.04858e+06",
        "choose world inside that range",
    ),
    (
        "bf16:reduce=bf16:reduce_order=tree",
        "reduce_order=tree is the order of an emulated reduction, and world=1 emulates none",
        "set world to a number of processes; among real ones the communication library chooses the order",
    ),
    ("fp16:reduce=int8", "policy field reduce='int8'; allowed: auto, fp32, bf16, fp16", "set reduce to one of them"),
    (
        "fp16:gather=bf16",
        "gather=bf16 under policy fp16 (compute=fp16, casting=ops); allowed: auto, fp32, fp16",
        GATHER_HINT,
    ),
    (
        "fp32:gather=bf16",
        "gather=bf16 under policy fp32 (compute=fp32, casting=none); allowed: auto, fp32",
        GATHER_HINT,
    ),
    (
        "mxfp8:scale_rule=exact",
        "scale_rule=exact under policy mxfp8; allowed: auto, rceil, floor",
        BLOCK_HINT.format("scale_rule", "nvfp4, mxfp4, mxfp8, fp8-block"),
    ),
    (
        "fp8:scale_rule=rceil",
        "scale_rule=rceil under policy fp8; allowed: auto",
        BLOCK_HINT.format("scale_rule", "nvfp4, mxfp4, mxfp8, fp8-block"),
    ),
    (
        "mxfp8:hadamard=wgrad",
        "hadamard=wgrad under policy mxfp8; allowed: auto",
        BLOCK_HINT.format("hadamard", "nvfp4, mxfp4"),
    ),
    (
        "mxfp4:weight_blocks=squares",
        "weight_blocks=squares under policy mxfp4; allowed: auto",
        BLOCK_HINT.format("weight_blocks", "nvfp4"),
    ),
    (
        "fp8-block:gradient_rounding=stochastic",
        "gradient_rounding=stochastic under policy fp8-block; allowed: auto",
        BLOCK_HINT.format("gradient_rounding", "nvfp4, mxfp4, mxfp8"),
    ),
    (
        "bf16:end_layers=compute",
        "end_layers=compute under policy bf16; allowed: bf16",
        BLOCK_HINT.format("end_layers", "nvfp4, mxfp4, mxfp8, fp8-block"),
    ),
    (
        "mxfp8:bf16_products=head",
        "bf16_products names 'head' under policy mxfp8; " + PRODUCTS_ALLOWED,
        "for example mxfp8:bf16_products=*.wgrad",
    ),
    (
        "fp8:bf16_products=*.wgrad",
        "bf16_products names '*.wgrad' under policy fp8; " + PRODUCTS_ALLOWED,
        "for example mxfp8:bf16_products=*.wgrad",
    ),
    (
        "bf16:op_lists=device:arithmetic=emulated",
        "op_lists=device and arithmetic=emulated contradict each other",
        "device lists are torch's own native kernels; emulation follows the portable lists",
    ),
]


def check_error(caught: pytest.ExceptionInfo[PolicyError], message: str, hint: str) -> None:
    assert caught.value.message == message
    assert caught.value.hint == hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("text", "message", "hint"), WRONG_TEXTS, ids=[text for text, _, _ in WRONG_TEXTS])
def test_wrong_text(text: str, message: str, hint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    check_error(caught, message, hint)


NAMES_HINT = "write {0}=name+name in a text, a list of strings in a file or in Python"
WRONG_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    # bool and str where a number belongs, and the other way round
    ({"init_scale": True}, f"init_scale=True; {SCALE_RANGE}", "choose init_scale inside that range"),
    ({"init_scale": "8"}, f"init_scale='8'; {SCALE_RANGE}", "choose init_scale inside that range"),
    ({"init_scale": None}, f"init_scale=None; {SCALE_RANGE}", "choose init_scale inside that range"),
    ({"hysteresis": True}, f"hysteresis=True; {COUNT_RANGE}", "choose hysteresis inside that range"),
    ({"hysteresis": 2.0}, f"hysteresis=2.0; {COUNT_RANGE}", "choose hysteresis inside that range"),
    (
        {"master_weights": 1},
        "master_weights=1; allowed: True, False",
        "set master_weights to one of them",
    ),
    (
        {"compute": ["fp16"]},
        "compute=['fp16']; did you mean fp16 or bf16? Allowed: fp32, tf32, fp16, bf16, fp8, mxfp8, mxfp4, nvfp4",
        "set compute to one of them",
    ),
    (
        {"fp32_modules": "head"},
        "fp32_modules='head'; allowed: names without any of ':+, '",
        NAMES_HINT.format("fp32_modules"),
    ),
    (
        {"fp32_modules": ["head"]},
        "fp32_modules=['head']; allowed: names without any of ':+, '",
        NAMES_HINT.format("fp32_modules"),
    ),
    ({"fp32": (1,)}, "fp32=(1,); allowed: names without any of ':+, '", NAMES_HINT.format("fp32")),
    ({"lower": ("",)}, "lower=('',); allowed: names without any of ':+, '", NAMES_HINT.format("lower")),
    *(
        (
            {"fp32_modules": (name,)},
            f"fp32_modules=({name!r},); allowed: names without any of ':+, '",
            NAMES_HINT.format("fp32_modules"),
        )
        for name in ("a:b", "a+b", "a,b", "a b", "a\tb", "a\nb", "\ud800")
    ),
]


@pytest.mark.parametrize(("fields", "message", "hint"), WRONG_FIELDS)
def test_wrong_field_value(fields: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        PRESETS["fp16"].replace(**fields)
    check_error(caught, f"policy field {message}", hint)


def test_unknown_field_in_replace() -> None:
    with pytest.raises(PolicyError) as caught:
        PRESETS["fp16"].replace(scale=8)
    message = f"a policy has no field 'scale'; did you mean min_scale or max_scale or scale_rule? Allowed: {FIELDS}"
    check_error(caught, message, FIELD_HINT)


def test_a_policy_built_directly_needs_a_preset_name() -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(name="O1", compute="fp16", casting="ops")
    check_error(
        caught,
        "policy field name='O1'; allowed: fp32, tf32, fp16, bf16, fp16-master, bf16-master, fp16-pure, bf16-pure, fp8, "
        "fp8-block, mxfp8, mxfp4, nvfp4",
        "start from Policy.parse(name) and change fields with replace",
    )


WRONG_FILES = [
    (
        b'policy = "fp16" # \xff\n',
        "policy file {path!r} is not TOML: 'utf-8' codec can't decode byte 0xff in position 18: invalid start byte",
        'start from the line: policy = "fp16"',
    ),
    (b"policy = 16\n", f"unknown policy '16'; did you mean fp16 or bf16 or O1? Allowed: {NAMES}", NAME_HINT),
    (b"[amp]\n", f"a policy has no field 'amp'; allowed: {FIELDS}", FIELD_HINT),
    (
        b'policy = "fp16"\ninit_scale = "8"\n',
        f"policy field init_scale='8'; {SCALE_RANGE}",
        "choose init_scale inside that range",
    ),
    (
        b'policy = "fp16"\ngrowth_interval = 8.0\n',
        f"policy field growth_interval=8.0; {COUNT_RANGE}",
        "choose growth_interval inside that range",
    ),
    (
        b'policy = "fp16"\nfp32 = "softmax"\n',
        "policy field fp32='softmax'; allowed: names without any of ':+, '",
        NAMES_HINT.format("fp32"),
    ),
    (
        b'policy = "fp16-pure"\nmaster_weights = "true"\n',
        "policy field master_weights='true'; did you mean True? Allowed: True, False",
        "set master_weights to one of them",
    ),
]


@pytest.mark.parametrize(("content", "message", "hint"), WRONG_FILES)
def test_wrong_file(content: bytes, message: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    check_error(caught, message.format(path=str(path)), hint)


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('policy = "fp16\n', encoding="utf-8")
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    start, _, place = caught.value.message.rpartition(" (")  # between them: the parser's own words
    assert start.startswith(f"policy file {str(path)!r} is not TOML: ")
    assert place == "at line 1, column 15)"
    assert caught.value.hint == 'start from the line: policy = "fp16"'


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "absent.toml"
    with pytest.raises(PolicyError) as caught:
        Policy.of(str(path))
    check_error(
        caught,
        f"cannot read the policy file {str(path)!r}: No such file or directory",
        'check the path; a policy file is TOML with policy = "fp16" and fields below it',
    )


# --- what a policy does on a device --------------------------------------------------------------


def gpu(major: int, minor: int) -> Device:
    return Device(kind="cuda", name=f"GPU {major}.{minor}", capability=(major, minor))


PLAIN = Device(kind="cpu", name="plain CPU", flags=frozenset({"avx2"}))
RICH = Device(kind="cpu", name="rich CPU", flags=frozenset({"amx_bf16", "avx512_fp16"}))
ABSENT = Device(kind="cuda", name="cuda")

LACKS_FP16 = "this CPU lacks avx512_fp16 or amx_fp16; native kernels would be many times slower than FP32"
LACKS_BF16 = "this CPU lacks avx512_bf16 or amx_bf16; native kernels would be many times slower than FP32"
LACKS_FP8 = "this CPU lacks units for 8-bit floating point; native kernels would be many times slower than FP32"
NO_ROWS = "compute capability {}, and row-wise FP8 is known to run from 9.0 to below 12.0; fp8_recipe=tensorwise is native here"
NO_TF32 = "TF32 is a mode of NVIDIA's matrix units; FP32 is used instead"
ASKED = "the policy asks for emulated arithmetic"

LACKS_BLOCKS = "this CPU lacks units for blocks that share a scale"
MXFP8 = "compute capability 10.0; torchao's MXFP8 layers run from 10.0"
NO_MXFP8 = "compute capability {}, and torchao's MXFP8 layers are known to run from 10.0 to below 12.0"
NO_DRIVER = "{} in such blocks is emulated on every device: Mezzo does not drive a GPU's units for it"
AMD = Device(kind="cuda", name="MI350X", architecture="gfx950")
ARITHMETIC = [
    ("fp32", PLAIN, "native", "every device computes in it"),
    ("fp32", gpu(9, 0), "native", "every device computes in it"),
    ("fp32:arithmetic=emulated", PLAIN, "native", "every device computes in it"),
    ("tf32", PLAIN, "native", NO_TF32),
    ("tf32", gpu(7, 0), "native", "compute capability 7.0, and matrix units take tf32 only from 8.0"),
    ("tf32", gpu(8, 0), "native", "compute capability 8.0; matrix units take tf32 from 8.0"),
    ("fp16", PLAIN, "emulated", LACKS_FP16),
    ("fp16", RICH, "native", "this CPU has avx512_fp16"),
    ("bf16", PLAIN, "emulated", LACKS_BF16),
    ("bf16", RICH, "native", "this CPU has amx_bf16"),
    ("bf16-pure", PLAIN, "emulated", LACKS_BF16),
    ("fp16:arithmetic=emulated", RICH, "emulated", ASKED),
    ("fp16:arithmetic=emulated", gpu(9, 0), "emulated", ASKED),
    ("fp16:arithmetic=native", PLAIN, "native", f"the policy asks for native arithmetic; {LACKS_FP16}"),
    ("fp16:op_lists=device", PLAIN, "native", f"the policy asks for device lists; {LACKS_FP16}"),
    (
        "bf16:arithmetic=native",
        RICH,
        "native",
        "the policy asks for native arithmetic; this CPU has amx_bf16",
    ),
    ("fp16", gpu(6, 1), "emulated", "compute capability 6.1, and matrix units take fp16 only from 7.0"),
    ("fp16", gpu(7, 0), "native", "compute capability 7.0; matrix units take fp16 from 7.0"),
    ("fp16-master", gpu(8, 0), "native", "compute capability 8.0; matrix units take fp16 from 7.0"),
    ("bf16", gpu(7, 0), "emulated", "compute capability 7.0, and matrix units take bf16 only from 8.0"),
    ("bf16", gpu(8, 0), "native", "compute capability 8.0; matrix units take bf16 from 8.0"),
    (
        "bf16:op_lists=device",
        gpu(9, 0),
        "native",
        "the policy asks for device lists; compute capability 9.0; matrix units take bf16 from 8.0",
    ),
    ("fp8", PLAIN, "emulated", LACKS_FP8),
    ("fp8", RICH, "emulated", LACKS_FP8),
    ("fp8", gpu(8, 0), "emulated", "compute capability 8.0, and matrix units take e4m3 only from 8.9"),
    ("fp8", gpu(8, 9), "native", "compute capability 8.9; matrix units take e4m3 from 8.9"),
    ("fp8", gpu(9, 0), "native", "compute capability 9.0; matrix units take e4m3 from 8.9"),
    ("fp8:arithmetic=emulated", gpu(9, 0), "emulated", ASKED),
    (
        "fp8:accumulate=fp22",
        gpu(9, 0),
        "emulated",
        "a device chooses the format of its own sums; accumulate=fp22 is emulated",
    ),
    (
        "fp8:arithmetic=native",
        gpu(9, 0),
        "native",
        "the policy asks for native arithmetic; compute capability 9.0; matrix units take e4m3 from 8.9",
    ),
    ("fp8:fp8_recipe=rowwise", PLAIN, "emulated", LACKS_FP8),
    ("fp8:fp8_recipe=rowwise", gpu(8, 9), "emulated", NO_ROWS.format("8.9")),
    ("fp8:fp8_recipe=rowwise", gpu(9, 0), "native", "compute capability 9.0; matrix units take e4m3 from 8.9"),
    ("fp8:fp8_recipe=rowwise", gpu(10, 0), "native", "compute capability 10.0; matrix units take e4m3 from 8.9"),
    ("fp8:fp8_recipe=rowwise", gpu(12, 0), "emulated", NO_ROWS.format("12.0")),
    ("mxfp8", PLAIN, "emulated", LACKS_BLOCKS),
    ("mxfp8", gpu(9, 0), "emulated", NO_MXFP8.format("9.0")),
    ("mxfp8:scale_rule=floor", gpu(10, 0), "native", MXFP8),
    ("mxfp8:bf16_products=*.wgrad", gpu(10, 3), "native", MXFP8.replace("10.0;", "10.3;")),
    ("mxfp8:bf16_products=*.dgrad", gpu(10, 0), "emulated", "torchao's MXFP8 layers have no bf16_products=*.dgrad"),
    (
        "mxfp8:gradient_rounding=stochastic",
        gpu(10, 0),
        "emulated",
        "torchao's MXFP8 layers have no gradient_rounding=stochastic",
    ),
    ("mxfp8", gpu(12, 0), "emulated", NO_MXFP8.format("12.0")),
    ("mxfp8", AMD, "emulated", "torchao's MXFP8 layers are for NVIDIA's GPUs"),
    ("mxfp4", gpu(10, 0), "emulated", NO_DRIVER.format("e2m1")),
    ("nvfp4", gpu(10, 0), "emulated", NO_DRIVER.format("e2m1")),
    ("fp8-block", gpu(9, 0), "emulated", NO_DRIVER.format("e4m3")),
]


@pytest.mark.parametrize(("text", "device", "arithmetic", "reason"), ARITHMETIC)
def test_arithmetic_on(text: str, device: Device, arithmetic: str, reason: str) -> None:
    assert Policy.parse(text).arithmetic_on(device) == (arithmetic, reason)


OTHER_FORMAT = "leave arithmetic=auto and op_lists=portable, which emulate it here, or choose another format"
REFUSED = [
    (
        "fp16:arithmetic=native",
        gpu(6, 1),
        "policy fp16:arithmetic=native asks for native fp16 arithmetic on GPU 6.1: "
        "compute capability 6.1, and matrix units take fp16 only from 7.0",
        OTHER_FORMAT,
    ),
    (
        "bf16:op_lists=device",
        gpu(7, 5),
        "policy bf16:op_lists=device asks for native bf16 arithmetic on GPU 7.5: "
        "compute capability 7.5, and matrix units take bf16 only from 8.0",
        OTHER_FORMAT,
    ),
    (
        "fp8:arithmetic=native",
        gpu(8, 6),
        "policy fp8:arithmetic=native asks for native fp8 arithmetic on GPU 8.6: "
        "compute capability 8.6, and matrix units take e4m3 only from 8.9",
        OTHER_FORMAT,
    ),
    (
        "fp8:arithmetic=native:fp8_recipe=rowwise",
        gpu(8, 9),
        "policy fp8:arithmetic=native:fp8_recipe=rowwise asks for native fp8 arithmetic on GPU 8.9: "
        + NO_ROWS.format("8.9"),
        OTHER_FORMAT,
    ),
    (
        "fp8:op_lists=device",
        PLAIN,
        f"policy fp8:op_lists=device asks for native fp8 arithmetic on plain CPU: {LACKS_FP8}",
        OTHER_FORMAT,
    ),
    (
        "fp8:fp8_recipe=rowwise",
        ABSENT,
        "policy fp8:fp8_recipe=rowwise cannot compute in e4m3 on cuda: torch finds no CUDA device on this machine",
        "choose another device: mezzo doctor lists this machine's devices",
    ),
    (
        "fp16",
        ABSENT,
        "policy fp16 cannot compute in fp16 on cuda: torch finds no CUDA device on this machine",
        "choose another device: mezzo doctor lists this machine's devices",
    ),
]


@pytest.mark.parametrize(("text", "device", "message", "hint"), REFUSED)
def test_arithmetic_that_a_device_cannot_give(text: str, device: Device, message: str, hint: str) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        Policy.parse(text).explain(device)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.exit_code == 3


MASTERS = "the optimizer updates FP32 masters; the model computes with their 16-bit copies"
IN_FP32 = ("weights", "fp32", "the optimizer updates them in FP32, so small updates are kept")
LOST = "updates smaller than half a unit in the last place are lost"
DYNAMIC = (
    "loss scale",
    "dynamic from 65536, grows every 2000 updates",
    "small gradients would become zero in fp16",
)
UNSCALED_FP16 = ("loss scale", "none", "the policy sets none; small gradients become zero")
UNSCALED_BF16 = ("loss scale", "none", "gradients in bf16 have FP32's range")
UNSCALED_FP32 = ("loss scale", "none", "gradients in fp32 have FP32's range")
LISTS = (
    "op lists",
    ", ".join(f"{sum(f.precision == p for f in FAMILIES)} families {p}" for p in ("lower", "fp32", "widest")),
    "CUDA autocast's lists, the same on every device",
)
NORMS_FP32 = ("normalisation layers", "fp32", "sums of squares leave 16-bit range or precision")

EXPLAINED = [
    (
        "fp32",
        PLAIN,
        [("compute", "fp32", "the policy casts nothing; TF32 is off"), IN_FP32, UNSCALED_FP32],
    ),
    ("tf32", PLAIN, [("compute", "fp32 matrix products", NO_TF32), IN_FP32, UNSCALED_FP32]),
    (
        "tf32",
        gpu(8, 0),
        [
            (
                "compute",
                "tf32 matrix products",
                "compute capability 8.0; matrix units take tf32 from 8.0",
            ),
            IN_FP32,
            UNSCALED_FP32,
        ],
    ),
    (
        "fp16",
        PLAIN,
        [("compute", "fp16, emulated on plain CPU", LACKS_FP16), IN_FP32, DYNAMIC, LISTS],
    ),
    (
        "bf16",
        RICH,
        [
            ("compute", "bf16, native on rich CPU", "this CPU has amx_bf16"),
            IN_FP32,
            UNSCALED_BF16,
            LISTS,
        ],
    ),
    (
        "fp16-master",
        PLAIN,
        [
            ("compute", "fp16, emulated on plain CPU", LACKS_FP16),
            ("weights", "fp16 with fp32 masters", MASTERS),
            DYNAMIC,
            NORMS_FP32,
        ],
    ),
    (
        "bf16-master",
        PLAIN,
        [
            ("compute", "bf16, emulated on plain CPU", LACKS_BF16),
            ("weights", "bf16 with fp32 masters", MASTERS),
            UNSCALED_BF16,
            NORMS_FP32,
        ],
    ),
    (
        "fp16-pure",
        gpu(7, 0),
        [
            (
                "compute",
                "fp16, native on GPU 7.0",
                "compute capability 7.0; matrix units take fp16 from 7.0",
            ),
            ("weights", "fp16 only", LOST),
            UNSCALED_FP16,
            ("normalisation layers", "fp16", "the policy casts the whole model"),
        ],
    ),
    (
        "bf16-pure",
        PLAIN,
        [
            ("compute", "bf16, emulated on plain CPU", LACKS_BF16),
            ("weights", "bf16 only", LOST),
            UNSCALED_BF16,
            ("normalisation layers", "bf16", "the policy casts the whole model"),
        ],
    ),
    (
        "fp8",
        gpu(9, 0),
        [
            ("compute", "fp8, native on GPU 9.0", "compute capability 9.0; matrix units take e4m3 from 8.9"),
            IN_FP32,
            UNSCALED_BF16,
            (
                "fp8 recipe",
                "tensorwise: operands e4m3, gradients e5m2",
                "one scale per tensor, from its largest magnitude at each use",
            ),
            (
                "speed",
                "compile the model: torch.compile(model)",
                "until torch.compile fuses them, scaling and casts are separate passes over every operand",
            ),
            LISTS,
        ],
    ),
    (
        "fp8:fp8_recipe=rowwise",
        PLAIN,
        [
            ("compute", "fp8, emulated on plain CPU", LACKS_FP8),
            IN_FP32,
            UNSCALED_BF16,
            (
                "fp8 recipe",
                "rowwise: operands e4m3, gradients e4m3",
                "one scale per row, so that E4M3's range is enough for gradients and a large value costs its own row only",
            ),
            (
                "speed",
                "slower than bf16",
                "every operation is emulated, also those in BF16: this shows what FP8 does to training, not how fast it is",
            ),
            LISTS,
        ],
    ),
    (
        "fp8:accumulate=hopper:gradients=bf16",
        PLAIN,
        [
            (
                "compute",
                "fp8, emulated on plain CPU",
                "a device chooses the format of its own sums; accumulate=hopper is emulated",
            ),
            IN_FP32,
            UNSCALED_BF16,
            (
                "fp8 recipe",
                "tensorwise: operands e4m3, gradients e5m2",
                "one scale per tensor, from its largest magnitude at each use",
            ),
            (
                "sums of products",
                "hopper",
                "results as fp22, gradients as fp22-128: what torchao's recipes ask of a Hopper",
            ),
            (
                "speed",
                "slower than bf16",
                "every operation is emulated, also those in BF16: this shows what FP8 does to training, not how fast it is",
            ),
            LISTS,
            (
                "sums of gradients",
                "bf16",
                "after each micro-batch the sum so far is rounded to it, so what is smaller than half a unit of the sum is lost",
            ),
        ],
    ),
    (
        "fp16:loss_scale=static:init_scale=128:op_lists=device:lower=gelu:fp32=bmm+mm:fp32_modules=head+norm*",
        gpu(8, 0),
        [
            (
                "compute",
                "fp16, native on GPU 8.0",
                "the policy asks for device lists; compute capability 8.0; matrix units take fp16 from 7.0",
            ),
            IN_FP32,
            ("loss scale", "static 128", "the policy fixes it"),
            ("op lists", "the device's", "whatever torch.autocast does on this device"),
            ("user op lists", "gelu: lower", "the policy names them"),
            ("user op lists", "bmm, mm: fp32", "the policy names them"),
            ("modules", "head, norm* in fp32", "the policy keeps them in FP32"),
        ],
    ),
    (
        "mxfp8",
        PLAIN,
        [
            ("compute", "mxfp8, emulated on plain CPU", "this CPU lacks units for blocks that share a scale"),
            IN_FP32,
            UNSCALED_BF16,
            (
                "mxfp8 recipe",
                "mxfp8: operands e4m3, gradients e4m3",
                "a scale in 8 bits for every 32 values; each product rounds its operands anew, in blocks along its own sum",
            ),
            ("scales", "e8m0, rceil", "a power of two, rounded up: nothing saturates"),
            ("blocks of weights", "1 x 32", "rows x columns"),
            (
                "speed",
                "slower than bf16",
                "every operation is emulated, also those in BF16: this shows what MXFP8 does to training, not how fast it is",
            ),
            LISTS,
        ],
    ),
    (
        "nvfp4:scale_rule=four_or_six:bf16_products=*.wgrad",
        PLAIN,
        [
            ("compute", "nvfp4, emulated on plain CPU", "this CPU lacks units for blocks that share a scale"),
            IN_FP32,
            UNSCALED_BF16,
            (
                "nvfp4 recipe",
                "nvfp4: operands e2m1, gradients e2m1",
                "a scale with 3 mantissa bits for every 16 values, so that the largest of each block keeps its place",
            ),
            (
                "scales",
                "e4m3, four_or_six",
                "the largest magnitude of a block becomes 4 or 6, whichever rounds with the smaller error",
            ),
            ("blocks of weights", "16 x 16", "the same values for both products"),
            (
                "gradients",
                "rounded at random",
                "on average nothing is lost; the draws follow from the step's own values, so a run can be repeated",
            ),
            (
                "Hadamard transform",
                "wgrad",
                "both operands of a weight's gradient are mixed 16 by 16, so that a large value is shared by its block",
            ),
            ("products in bf16", "*.wgrad", "the policy names them"),
            (
                "speed",
                "slower than bf16",
                "every operation is emulated, also those in BF16: this shows what NVFP4 does to training, not how fast it is",
            ),
            LISTS,
        ],
    ),
    (
        "mxfp4:scale_rule=floor:hadamard=wgrad",
        PLAIN,
        [
            ("compute", "mxfp4, emulated on plain CPU", "this CPU lacks units for blocks that share a scale"),
            IN_FP32,
            UNSCALED_BF16,
            (
                "mxfp4 recipe",
                "mxfp4: operands e2m1, gradients e2m1",
                "a scale in 8 bits for every 32 values; each product rounds its operands anew, in blocks along its own sum",
            ),
            ("scales", "e8m0, floor", "a power of two, rounded down: the largest values of a block may saturate"),
            ("blocks of weights", "1 x 32", "rows x columns"),
            (
                "Hadamard transform",
                "wgrad",
                "both operands of a weight's gradient are mixed 16 by 16, so that a large value is shared by its block",
            ),
            (
                "speed",
                "slower than bf16",
                "every operation is emulated, also those in BF16: this shows what MXFP4 does to training, not how fast it is",
            ),
            LISTS,
        ],
    ),
    (
        "fp8-block:scale_rule=rceil",
        PLAIN,
        [
            ("compute", "fp8, emulated on plain CPU", "this CPU lacks units for blocks that share a scale"),
            IN_FP32,
            UNSCALED_BF16,
            ("fp8 recipe", "blockwise: operands e4m3, gradients e4m3", "a large value costs the 127 beside it only"),
            ("scales", "e8m0, rceil", "a power of two, rounded up: nothing saturates"),
            ("blocks of weights", "128 x 128", "the same values for both products"),
            (
                "speed",
                "slower than bf16",
                "every operation is emulated, also those in BF16: this shows what FP8 does to training, not how fast it is",
            ),
            LISTS,
        ],
    ),
    (
        "fp32:reduce=bf16:world=384:reduce_order=tree",
        gpu(8, 0),
        [
            ("compute", "fp32", "the policy casts nothing; TF32 is off"),
            IN_FP32,
            ("loss scale", "none", "gradients in fp32 have FP32's range"),
            (
                "reduction",
                "bf16, emulated for 384 processes in a tree",
                "each process' share and every partial sum are rounded; shares are drawn at random around the gradient",
            ),
        ],
    ),
    (
        "bf16:reduce=fp16:gather=bf16",
        gpu(8, 0),
        [
            ("compute", "bf16, native on GPU 8.0", "compute capability 8.0; matrix units take bf16 from 8.0"),
            IN_FP32,
            ("loss scale", "none", "gradients in bf16 have FP32's range"),
            LISTS,
            ("reduction", "fp16", "gradients are rounded to it and summed over the processes in it"),
            (
                "gathering",
                "bf16",
                "weights that fully_shard has sharded are gathered in it, and computed with in it; others stay as they are",
            ),
        ],
    ),
]


@pytest.mark.parametrize(("text", "device", "choices"), EXPLAINED)
def test_explain(text: str, device: Device, choices: list[tuple[str, str, str]]) -> None:
    found = Policy.parse(text).explain(device)
    known = "it has run" if device.has_run else "none"
    evidence = [] if device.kind == "cpu" else [("evidence", known, device.evidence)]
    assert [(c.what, c.value, c.reason) for c in found] == [*choices, *evidence]


def test_every_preset_is_explained() -> None:
    assert {text.split(":")[0] for text, _, _ in EXPLAINED} == set(PRESETS)


@pytest.mark.parametrize("name", PRESET_FIELDS)
def test_explain_on_this_cpu(name: str) -> None:
    policy = PRESETS[name]
    choices = policy.explain("cpu")

    assert choices == policy.explain()
    assert [c.what for c in choices][:3] == ["compute", "weights", "loss scale"]
    assert all(c.value and c.reason for c in choices)
    named = [word for word in ("emulated", "native") if f", {word} on " in choices[0].value]
    assert len(named) == (1 if policy.lowers else 0)
