"""Collect misuse while a script runs: its first occurrence, its lines, and its count."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from mezzo.observe.limits import MOST_LISTED
from mezzo.observe.lint.rules import BY_CODE
from mezzo.observe.module_names import Names
from mezzo.observe.observer import ModuleTree, ObservedRun
from mezzo.observe.source_lines import running_line
from mezzo.records import Finding

ENOUGH = 2
"""Updates that must show the same misuse before it is reported."""
_MAX_LINES = 4
_ORDER = ("error", "warning", "info", "")


class MisuseLog:
    """The misuse found in a run, one entry per code."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        self._findings: dict[str, Finding] = {}

    def add(
        self,
        code: str,
        detail: str,
        *,
        parameters: Iterable[Tensor] = (),
        modules: Iterable[nn.Module] = (),
        line: str | None = None,
        step: int | None = None,
        count: int = 1,
    ) -> None:
        """Record a misuse.

        Args:
            code: its code.
            detail: a sentence on what was found; only the first for a code is kept.
            parameters: the weights concerned, for their modules' names.
            modules: the modules concerned.
            line: the script's line; the one running now if left out.
            step: the number of the step; the current one if left out.
            count: the number of occurrences.
        """
        line = running_line() if line is None else line
        finding = self._findings.get(code)
        if finding is None:
            misuse = BY_CODE[code]
            self._findings[code] = Finding(
                code=code,
                title=misuse.title,
                severity=misuse.severity,
                modules=_named(self._run.objects.roots, parameters, modules),
                detail=detail,
                gain=misuse.harm,
                fix=misuse.fix,
                lines=[line] if line else [],
                step=self._run.update.recorder.num_closed + 1 if step is None else step,
                count=count,
            )
            return
        new = [line] if line and line not in finding.lines and len(finding.lines) < _MAX_LINES else []
        self._findings[code] = finding.model_copy(
            update={"count": finding.count + count, "lines": [*finding.lines, *new]}
        )

    def __contains__(self, code: str) -> bool:
        return code in self._findings

    def findings(self) -> list[Finding]:
        """Return all misuse found, the most severe first."""
        return sorted(self._findings.values(), key=lambda f: (_ORDER.index(f.severity), f.code))


def _named(roots: Iterable[nn.Module], parameters: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[str]:
    """Return the names of modules; for a model whose parameters are all among ``parameters``, only its class."""
    models, listed = list(roots), [id(p) for p in parameters]
    concerned = set(listed)
    names = Names(models, ModuleTree())
    whole = [model for model in models if (ids := [id(p) for p in model.parameters()]) and concerned.issuperset(ids)]
    covered = {id(p) for model in whole for p in model.parameters()}
    named = [type(getattr(model, "_orig_mod", model)).__name__ for model in whole]  # the class inside torch.compile's
    named += [names.of_parameter(p) for p in listed if p not in covered]
    named += [names.of(module) for module in modules]
    return list(dict.fromkeys(named))[:MOST_LISTED]
