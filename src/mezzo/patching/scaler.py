"""A loss scaler written into a loop: created next to the optimizer, and called in its place."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod

from mezzo.patching import checkpoints
from mezzo.patching.job import PatchJob
from mezzo.patching.places import Home, ScriptUpdates, common_home, indentation
from mezzo.patching.reading import Backward
from mezzo.patching.text import last_line, unclear
from mezzo.patching.tree import calls_in


def refuse_in_any_library(job: PatchJob) -> None:
    """Refuse what a scaler cannot work with in any library.

    Raises:
        Unclear: names the line and what to do.
    """
    script = job.script
    closures = [s for s in script.steps if s.has_closure]
    if closures:
        unclear(
            f"line {closures[0].call.lineno} passes a closure to {closures[0].name}.step(), and a loss scale cannot be used with "
            "closures: the optimizer reads the loss and the gradients while they are scaled",
            "use bf16, which needs no loss scale",
        )
    hooks = script.calls_to(r".*\.(register_hook|register_post_accumulate_grad_hook)")
    if hooks:
        unclear(
            f"line {hooks[0].lineno} registers a hook on gradients, which would receive scaled ones",
            "use bf16, or move the hook's work between scaler.unscale_(optimizer) and scaler.step(optimizer)",
        )
    compiled = [s for s in script.steps if _in_compiled_function(job, s.call)]
    if compiled:
        unclear(
            f"line {compiled[0].call.lineno} updates inside a compiled function or a lambda, where a GradScaler cannot skip",
            "compile the model or the loss only, or use bf16",
        )


def _in_compiled_function(job: PatchJob, stmt: ast.AST) -> bool:
    """Return whether a call is in a lambda, or in a function that the library's compiler is passed or decorates."""
    tree, compiler = job.script.tree, job.script.library.compiler
    if isinstance(tree.function(stmt), ast.Lambda):
        return True
    functions = [s for s in tree.scopes(stmt) if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))]
    compiled = {ast.unparse(a) for c in job.script.calls_to(re.escape(compiler)) for a in c.args}
    decorators = [tree.dotted(d.func if isinstance(d, ast.Call) else d) for f in functions for d in f.decorator_list]
    return compiler in decorators or any(f.name in compiled for f in functions)


class Scaler(ABC):
    """The script's only GradScaler, created next to its optimizers."""

    def __init__(self, job: PatchJob) -> None:
        self._job = job
        self._script, self._editor = job.script, job.editor
        self._updates = ScriptUpdates(job.script)
        self.name = job.script.tree.free_name("scaler", "grad_scaler")
        if not self._script.steps:
            unclear(
                "no update was found: no call to an optimizer's step()",
                "call scaler.step(optimizer) and scaler.update() where your loop updates the weights",
            )
        self.home = common_home(
            [job.places.home(s.name, s.stmt) for s in self._script.steps],
            "the script has several training loops, whose optimizers are created in different functions",
            "give each loop a GradScaler of its own",
        )
        self._follow_moves()
        job.places.check_order(self.home, [b.stmt for b in self._script.backwards])

    def _follow_moves(self) -> None:
        """Move the home below the statement that moves the model, if that comes after the optimizer."""
        block = self._script.tree.block(self.home.after)
        uses = min(s.call.lineno for s in self._script.steps)
        for stmt in block[block.index(self.home.after) + 1 :]:
            calls = [call.func for call in calls_in(stmt) if isinstance(call.func, ast.Attribute)]
            moved = [f for f in calls if f.attr in ("to", "cuda") and ast.unparse(f.value) in self._script.models]
            repeats = isinstance(stmt, (ast.For, ast.While, ast.FunctionDef, ast.ClassDef))
            if moved and not repeats and stmt.lineno < uses:
                self.home = Home(self.home.scope, stmt, self.home.owner)

    @abstractmethod
    def create(self) -> None:
        """Create the scaler after the last optimizer."""

    @abstractmethod
    def value_of(self, scaler: str) -> str:
        """Return the expression for a scaler's scale."""

    def created(self, *lines: str) -> None:
        """Write the lines that create the scaler, the last of which assigns it."""
        self._editor.line_after(self.home.after, *lines)
        why = "FP16 gradients need a loss scale; created once, so that the scale persists"
        self._job.note(f"line {last_line(self.home.after)}", lines[-1], why)

    def at(self, node: ast.AST) -> str:
        """Return the expression for the scaler at a node; where needed, pass the scaler there through functions."""
        annotation = f"{self._job.library}.amp.GradScaler"
        return self._job.places.reach(self.name, self.home, node, annotation=annotation)

    def replace_calls(self, names: dict[Backward, str]) -> None:
        """Scale the losses, and step, update and save through the scaler."""
        for backward in self._script.backwards:
            self.scale(backward, names.get(backward))
        for step in self._script.steps:
            arguments = [step.optimizer, *step.call.args, *step.call.keywords]
            method = "minimize" if step.minimizes else "step"
            written = ", ".join(map(self._job.text.of, arguments))
            self._editor.replace(step.call, f"{self.at(step.stmt)}.{method}({written})")
            why = "unscales the gradients, and skips the update if one is not finite"
            self._job.note(step.stmt, f"scaler.{method}()", why)
        self.unscale_before_reads()
        self.update()
        self.checkpoint()

    def scale(self, backward: Backward, name: str | None) -> None:
        """Scale a loss before its backward pass."""
        scaler, text, func = self.at(backward.stmt), self._job.text, backward.call.func
        (start, end), begin = text.span(backward.loss), text.span(backward.call)[0]
        if name is not None:
            self._editor.replace(backward.loss, f"{scaler}.scale({name})")
        elif isinstance(func, ast.Attribute) and func.value is backward.loss and begin < start:
            self._editor.insert(begin, f"{scaler}.scale")  # the loss has parentheses
        else:
            self._editor.insert(start, f"{scaler}.scale(")
            self._editor.insert(end, ")")
        self._job.note(backward.stmt, "scaler.scale(loss)", "without it, small FP16 gradients would become zero")

    def unscale_before_reads(self) -> None:
        """Unscale before gradients are clipped or read."""
        calls = [b.call for b in self._script.backwards]
        for read in self._updates.reads(calls):
            scaler, optimizer = self.at(read.stmt), self._job.text.of(read.step.optimizer)
            lines = [f"{scaler}.unscale_({optimizer})"]
            if read.over is not None:
                unit = indentation(self._script, read.step.stmt)
                target, over = self._job.text.of(read.over.target), self._job.text.of(read.over.iter)
                lines = [f"for {target} in {over}:", unit + lines[0]]
            self._editor.line_before(read.stmt, *lines)
            self._job.note(
                read.stmt, "scaler.unscale_() before it", "it must clip or read true gradients, not scaled ones"
            )

    def update(self) -> None:
        """Update the scale once in each pass through a training loop, and step schedules only if the update was not skipped."""
        guarded: list[ast.Expr] = []
        for stmt in self._updates.last_ones():
            scaler, schedules = self.at(stmt), self._updates.schedules_after(stmt)
            guarded += schedules
            scale = self._script.tree.free_name("scale", "scale_before", "loss_scale_before")
            before = [f"{scale} = {self.value_of(scaler)}"] if schedules else []
            if self._minimizes(stmt):  # which updates the scale, too
                if before:
                    self._editor.line_before(stmt, *before)
            else:
                self._editor.line_after(stmt, *before, f"{scaler}.update()")
                why = "the loss scale backs off after an overflow, and grows after many updates"
                self._job.note(f"line {last_line(stmt)}", "scaler.update() after it", why)
            for run in self._adjacent(schedules):
                unit = indentation(self._script, run[0])
                header = f"if {self.value_of(scaler)} >= {scale}:"
                self._editor.wrap(run[0], run[-1], header, unit=unit, comment="  # the update was not skipped")
                self._job.note(
                    run[0], "skipped with the update", "a schedule must not advance when the optimizer does not"
                )
        for call in self._script.schedule_steps:
            if self._script.tree.statement(call) not in guarded:
                why = "it does not step right after each update, so it also steps after skipped updates"
                self._job.note(call, "schedule left as it is", why)

    def _minimizes(self, stmt: ast.stmt) -> bool:
        return any(step.minimizes for step in self._script.steps if self._updates.holder(step) is stmt)

    def _adjacent(self, stmts: list[ast.Expr]) -> list[list[ast.Expr]]:
        """Return ``stmts`` in runs of statements that directly follow each other in one block."""
        runs: list[list[ast.Expr]] = []
        for stmt in stmts:
            block = self._script.tree.block(stmt)
            if runs and runs[-1][-1] in block and block.index(runs[-1][-1]) == block.index(stmt) - 1:
                runs[-1].append(stmt)
            else:
                runs.append([stmt])
        return runs

    def checkpoint(self) -> None:
        """Save and load the scale with the optimizer's state."""
        ways = {"state_dict": checkpoints.add_to_save, "load_state_dict": checkpoints.add_to_load}
        for method, add in ways.items():
            for place in checkpoints.calls_of(self._script, method):
                scaler = self.at(place.stmt)
                if add(self._script, self._editor, place, scaler):
                    why = "a resumed run continues with its loss scale"
                    self._job.note(place.stmt, "the scaler's state with it", why)
                else:
                    self._job.note(place.stmt, "left as it is", f"save and load {scaler}.state_dict() there, too")
