"""The cases in order of importance, with the seconds that each needs on a data-centre GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

SMALL = {"mobilenetv3_large": 32, "bert_base": 8, "resnet50": 32, "gpt2": 4}
LARGE = {"mobilenetv3_large": 256, "bert_base": 64, "resnet50": 256, "gpt2": 16}
BUILT_IN = {"tiny_convnet": 4, "tiny_transformer": 2}
"""Models of torch's own layers, for a run that tests this program on a CPU."""
LOST = 75
"""Exit code of the measuring process if its GPU no longer answers."""
POLICIES = ("fp32", "tf32", "fp16", "bf16", "fp16-master", "bf16-master", "fp8")


@dataclass(frozen=True)
class Way:
    """A way to train: the library, the policy, and how steps run."""

    library: str
    """``mezzo``, ``torch.amp``, ``accelerate`` or ``fabric``."""
    policy: str
    mode: str = "eager"
    """``eager``, ``compiled``, ``captured`` (CUDA graphs), ``compiled captured`` or ``reduce-overhead`` (torch.compile's graphs)."""

    def __str__(self) -> str:
        return f"{self.library} {self.policy} {self.mode}"


@dataclass(frozen=True)
class Case:
    """A measurement that compares several ways, which are timed alternately."""

    name: str
    kind: str
    """``roofs``, ``optimizer`` or ``training``."""
    seconds: float
    model: str = ""
    batch: int = 0
    ways: tuple[Way, ...] = ()
    reference: Way | None = None
    """The way that the others are compared with."""


def plan(*, tiny: bool) -> list[Case]:
    if tiny:
        convnet, transformer = (_headline(name, batch) for name, batch in BUILT_IN.items())
        named = [_peers(name, 2) for name in SMALL]
        compiled = _compiled("tiny_convnet", 4)
        policies = [_policy("tiny_transformer", 2, policy) for policy in POLICIES]
        cases = [ROOFS, convnet, transformer, OPTIMIZER, compiled, *policies, *named]
        return [replace(case, seconds=2) for case in cases]
    first = [ROOFS, _headline("mobilenetv3_large", 32), _headline("bert_base", 8), OPTIMIZER]
    best = [_compiled(model, LARGE[model]) for model in ("resnet50", "gpt2", "bert_base", "mobilenetv3_large")]
    rest = [_peers(model, sizes[model]) for sizes in (SMALL, LARGE) for model in sizes]
    every = [_policy(m, sizes[m], policy) for policy in POLICIES for sizes in (SMALL, LARGE) for m in sizes]
    return [*first, *best, *rest, *every]


ROOFS = Case("roofs", "roofs", 8)
OPTIMIZER = Case("optimizer 110M", "optimizer", 20)


def _training(kind: str, model: str, batch: int, ways: list[Way], reference: Way, seconds: float) -> Case:
    return Case(f"{kind} {model} b{batch}", "training", seconds, model, batch, tuple(ways), reference)


def _headline(model: str, batch: int) -> Case:
    return _beside(model, batch, "fp16", "captured")


def _peers(model: str, batch: int) -> Case:
    return _beside(model, batch, "bf16", "peers")


def _beside(model: str, batch: int, policy: str, kind: str) -> Case:
    loop = Way("torch.amp", policy)
    ours = [Way("mezzo", policy, "captured"), Way("mezzo", f"{policy}-master", "captured"), Way("mezzo", policy)]
    # A fair comparison for captured steps: the hand-written loop in a CUDA graph.
    theirs = [Way("torch.amp", policy, "captured"), Way("accelerate", policy), Way("fabric", policy)]
    return _training(kind, model, batch, [ours[0], loop, *ours[1:], *theirs], loop, 50)


def _compiled(model: str, batch: int) -> Case:
    loop = Way("torch.amp", "bf16", "compiled")
    # reduce-overhead is built first: its recording frees cuBLAS's workspaces, and a graph captured before would replay on one of them.
    ways = [Way("torch.amp", "bf16", "reduce-overhead"), Way("mezzo", "bf16", "compiled captured"), loop]
    ways += [Way("mezzo", "bf16", "captured"), Way("torch.amp", "bf16", "captured"), Way("torch.amp", "bf16")]
    return _training("compiled", model, batch, ways, loop, 85)


def _policy(model: str, batch: int, policy: str) -> Case:
    # One case per policy: captured steps keep their memory, and all policies together would not fit.
    loop = Way("torch.amp", "bf16" if policy == "fp8" else policy.removesuffix("-master"))
    ways = [loop, Way("mezzo", policy), Way("mezzo", policy, "captured")]
    return _training(f"policy {policy}", model, batch, ways, loop, 25)
