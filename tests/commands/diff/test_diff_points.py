"""Generation with a cache against one forward pass, and compiled against eager: compared where the values have names."""

from __future__ import annotations

import pytest
import torch

from helpers_diff import text_of, unedited, values_of
from mezzo.commands.diff.answer import answer
from mezzo.commands.diff.judge import Parting, judge

COMPILED = """
def backend(graph, inputs):
    for node in graph.graph.nodes:
        if node.target is torch.nn.functional.silu and %s:
            node.target = torch.tanh
            node.kwargs = {}
    graph.recompile()
    return graph

model.compile(backend=backend)
""".strip()


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# no edit", "", True),
        ("caches, n) for n", "caches, n + 1) for n", False),
        ("is_causal=cache is None", "is_causal=False", False),
    ],
    ids=["a cache", "places one off", "no mask"],
)
def test_a_cache_against_one_pass(old: str, new: str, same: bool) -> None:
    log = values_of(text_of("generation").replace(old, new))
    (point,) = answer(log, log, judge(log, log), control=None, control_of_b=False)["points"][2:3]
    assert (point.name, point.against) == ("log-probabilities", "values 1 and 2 of the first run")
    assert point.is_log_probabilities
    assert (point.distance < 1e-6, point.kl < 1e-6, point.outside == 0.0) == (same, same, same)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_compiled_against_eager(wrong: bool) -> None:
    """A compiler that replaces a function; torch's own needs no C++ compiler for a backend that only returns the graph."""
    a, again, control = unedited("masks")
    text = text_of("masks").replace("# model", COMPILED % wrong)
    b = values_of(text, outcomes_only=True)
    torch._dynamo.reset()
    found: Parting = judge(a, b, again=again, control=control)
    kinds = [(a.events[one.a].kind, a.events[one.a].step) for one in found.beginnings[:1]]
    assert kinds == ([("loss", 1)] if wrong else [])
