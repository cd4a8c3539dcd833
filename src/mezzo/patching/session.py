"""A loop that calls torch directly, patched for ``mezzo.Session``: for policies that torch.amp cannot express."""

from __future__ import annotations

import ast

from mezzo.patching import checkpoints
from mezzo.patching.checkpoints import autocast_validation
from mezzo.patching.job import PatchJob
from mezzo.patching.places import Home, ScriptUpdates, common_home, last_home
from mezzo.patching.reading import Backward, StepCall
from mezzo.patching.regions import Regions
from mezzo.patching.text import last_line, unclear
from mezzo.patching.torch_amp import refuse_what_scaling_breaks
from mezzo.patching.tree import calls_in


def patch_loop(job: PatchJob) -> None:
    """Create a session next to the optimizers, and let it run the backward passes and the updates.

    Raises:
        Unclear: a session cannot run the loop.
    """
    if job.policy.compute == "tf32":
        unclear("TF32 needs no session", "set torch's switches instead")
    if job.policy.loss_scale != "none":
        refuse_what_scaling_breaks(job)
    _Session(job).patch()


class _Session:
    """The edits that replace backward passes and updates with calls of a session."""

    def __init__(self, job: PatchJob) -> None:
        self._job, self._script, self._tree = job, job.script, job.script.tree
        self._updates = ScriptUpdates(job.script)
        self.name = self._tree.free_name("session", "precision_session")
        steps = self._script.steps
        closures = [s for s in steps if s.has_closure]
        if closures:
            where = closures[0].call.lineno
            unclear(
                f"line {where} passes a closure to step(), which a session does not support", "use bf16 with torch.amp"
            )
        if not steps:
            unclear(
                "no update was found: no call to an optimizer's step()",
                "call session.update() where your loop updates the weights",
            )
        over = [s for s in steps if self._updates.loop_over_optimizers(s)]
        if over:
            unclear(
                f"line {over[0].call.lineno} updates several optimizers in a loop",
                "pass them all to mezzo.Session, and call update() once",
            )
        self._homes = [job.places.home(s.name, s.stmt) for s in steps]
        several = "the script has several training loops, whose optimizers are created in different functions"
        common_home(self._homes, several, "give each a mezzo.Session")
        self._schedules = self._passed_schedules()
        self.home = self._latest()
        job.places.check_order(self.home, [b.stmt for b in self._script.backwards])

    def _passed_schedules(self) -> dict[str, ast.stmt]:
        """Return the schedules that step with each update, with the statements that step them: the session will step them instead."""
        stmts = [s for update in self._updates.last_ones() for s in self._updates.schedules_after(update)]
        return {ast.unparse(stmt.value).removesuffix(".step()"): stmt for stmt in stmts}

    def _latest(self) -> Home:
        """Return the place after the last optimizer and the last schedule that are passed to the session."""
        homes = [*self._homes]
        for name, stmt in self._schedules.items():
            homes.append(self._job.places.home(name, stmt))
            elsewhere = f"line {stmt.lineno} steps a schedule that is not created where its optimizer is"
            common_home(homes, elsewhere, "create them in one function")
        self._schedules_here = [home.name for home in homes[len(self._homes) :]]
        return last_home(homes)

    def patch(self) -> None:
        """Edit the script."""
        job = self._job
        job.imports("mezzo")
        self._create()
        regions = Regions(self._script, self._script.backwards)
        names = job.autocast(regions, self._opening)
        if job.policy.casting == "model":
            self._check_evaluation()
        autocast_validation(job, self._opening, why_not=self._why_not_validated)
        for backward in self._script.backwards:
            self._backward(backward, names.get(backward))
        self._update()
        methods = ("state_dict", "load_state_dict")
        for place in (saved for method in methods for saved in checkpoints.calls_of(self._script, method)):
            job.note(
                place.stmt,
                "left as it is",
                f"{self.name}.state_dict() contains models, optimizers, schedules and loss scale together",
            )

    def _opening(self, stmt: ast.stmt) -> str:
        return f"{self._at(stmt)}.autocast()"

    def _at(self, node: ast.AST) -> str:
        return self._job.places.reach(self.name, self.home, node, annotation=f"{self._job.name_of('mezzo')}.Session")

    def _why_not_validated(self, node: ast.stmt) -> str:
        inside = getattr(node, "body", [node])[0]
        return "" if self._reaches(inside) else f"{self.name} cannot be reached from here"

    def _reaches(self, stmt: ast.stmt) -> bool:
        if self.home.owner:
            return self._tree.class_of(stmt) is self.home.scope
        return self.home.scope in self._tree.scopes(stmt)

    def _check_evaluation(self) -> None:
        """Refuse a model in 16 bits that is evaluated out of the session's reach: FP32 inputs would not fit its weights."""
        for node in self._tree.nodes:
            if isinstance(node, ast.stmt) and self._script.grads_off(node) and self._script.runs_forward(node):
                inside = getattr(node, "body", [node])[0]
                if not self._reaches(inside):
                    unclear(
                        f"line {node.lineno} evaluates the model where the session cannot be reached, and its weights are in 16 bits",
                        "pass the session to this function, and evaluate under session.autocast()",
                    )

    def _create(self) -> None:
        optimizers = [*dict.fromkeys(home.name for home in self._homes)]
        models = [*dict.fromkeys(m for name in optimizers for m in self._models_of(name))]
        arguments = [_listed(models), _listed(optimizers), f'policy="{self._job.policy}"']
        if self._schedules:
            arguments.append(f"scheduler={_listed(self._schedules_here)}")
        line = f"{self.home.owner}{self.name} = {self._job.name_of('mezzo')}.Session({', '.join(arguments)})"
        self._job.editor.line_after(self.home.after, line)
        self._job.note(
            f"line {last_line(self.home.after)}",
            line,
            "the session casts, scales, unscales, updates or skips, and steps the schedule",
        )

    def _models_of(self, optimizer: str) -> list[str]:
        base = optimizer.split("[")[0]
        calls = [call for name, call in self._script.assigned_calls if name == base]
        found = [
            ast.unparse(n.func.value)
            for call in calls
            for n in calls_in(call)
            if isinstance(n.func, ast.Attribute) and n.func.attr in ("parameters", "named_parameters")
        ]
        if not found:
            line = f'mezzo.Session(model, {optimizer}, policy="{self._job.policy}")'
            unclear(f"the model that {optimizer} updates was not found", f"write {line}")
        return found

    def _backward(self, backward: Backward, name: str | None) -> None:
        call, text = backward.call, self._job.text
        if not isinstance(call.func, ast.Attribute) or call.func.value is not backward.loss:
            instead = "call session.backward(loss, retain_graph=True) for each"
            unclear(f"line {call.lineno} differentiates several losses in one call", instead)
        keywords = [ast.unparse(k) for k in call.keywords]
        if call.args or any(not keyword.startswith("retain_graph") for keyword in keywords):
            why = f"line {call.lineno} passes arguments to backward() that a session does not accept"
            unclear(why, "sum the losses with their weights first")
        loss = name or text.of(backward.loss)
        self._job.editor.replace(call, f"{self._at(backward.stmt)}.backward({', '.join([loss, *keywords])})")
        self._job.note(backward.stmt, "session.backward(loss)", "scales the loss")

    def _update(self) -> None:
        editor = self._job.editor
        for group in self._groups():
            last = group[-1]
            names = [self._job.text.of(s.optimizer) for s in group]
            arguments = "" if {s.name for s in group} == {s.name for s in self._script.steps} else ", ".join(names)
            editor.replace(last.call, f"{self._at(last.stmt)}.update({arguments})")
            for step in group[:-1]:
                editor.delete(step.stmt)
            self._job.note(last.stmt, "session.update()", "unscales, updates or skips, and clears the gradients")
        calls = [b.call for b in self._script.backwards]
        for stmt in dict.fromkeys(read.stmt for read in self._updates.reads(calls)):
            editor.line_before(stmt, f"{self._at(stmt)}.unscale()")
            self._job.note(stmt, "session.unscale() before it", "it must clip or read true gradients, not scaled ones")
        for name, stmt in self._schedules.items():
            editor.delete(stmt)
            self._job.note(stmt, f"{name}.step() removed", "the session steps it, except after skipped updates")

    def _groups(self) -> list[list[StepCall]]:
        """Return the updates in groups with no backward pass in between: each group is one update of the session."""
        groups: list[list[StepCall]] = []
        backward = [b.stmt for b in self._script.backwards]
        for step in self._script.steps:
            before, block = groups[-1][-1] if groups else None, self._tree.block(step.stmt)
            if before is not None and self._tree.block(before.stmt) is block:
                between = block[block.index(before.stmt) : block.index(step.stmt)]
                if not any(b is n for s in between for n in ast.walk(s) for b in backward):
                    groups[-1].append(step)
                    continue
            groups.append([step])
        return groups


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
