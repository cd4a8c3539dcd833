"""Choose how to patch a script: by the interface that it trains with, in a style that can express the policy."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from mezzo.patching import frameworks, keras, paddle, session, torch_amp
from mezzo.patching.job import PatchJob
from mezzo.patching.reading import PADDLE, ScriptFacts
from mezzo.patching.text import LoopKind, Patch, PatchStyle, Refused, Text, Unclear, WrittenStyle, unclear, unified
from mezzo.policy import Policy


def make_patch(path: Path, *, policy: Policy, style: PatchStyle = "auto") -> Patch | Refused:
    """Return the change to a script that turns on a policy, or the reason why there is none.

    The script is only read, and the text between the changes stays byte for byte the same. If the training loop is in another of the
    user's files, next to the script, that file is patched.

    Args:
        path: a Python file.
        policy: what to turn on.
        style: ``torch.amp`` or ``mezzo`` for a loop that calls torch directly; ``auto`` for torch.amp, or Mezzo's session where torch.amp
            cannot express the policy. For libraries that train, the library's own argument is set in any style.
    """
    try:
        return _patch_of(path, policy, style)
    except Unclear as refusal:
        return refusal.refused
    except RecursionError:
        return Refused(reason=f"{path} is nested too deeply to be read", by_hand="patch it by hand")


def _patch_of(path: Path, policy: Policy, style: PatchStyle) -> Patch:
    script = _parsed(path)
    trainer = frameworks.trainer_of(script)
    in_library = trainer is not None or keras.keras_in(script) is not None or paddle.preparations(script)
    if not in_library and not script.backwards:
        neighbour = neighbour_with_loop(path)
        if neighbour is not None:
            return _patch_of(neighbour, policy, style)
    if policy.compute == "fp32":
        unclear("fp32 adds nothing to a script", "keep the script as it is", already=True)
    if keras.keras_in(script) is not None:
        return _finish(path, PatchJob(script, policy), keras.patch, "keras", "framework")
    if trainer is not None:
        return _finish(
            path, PatchJob(script, policy), lambda job: frameworks.patch(job, trainer), trainer.kind, "framework"
        )
    if script.library is PADDLE:
        return _in_paddle(path, script, policy, style)
    if policy.compute == "tf32":
        return _finish(path, PatchJob(script, policy), torch_amp.patch_tf32, _kind(script), "torch.amp")
    return _loop(path, script, policy, style)


def _parsed(path: Path) -> ScriptFacts:
    text = Text.read(path)
    try:
        return ScriptFacts(text)
    except (SyntaxError, ValueError) as error:
        unclear(f"{path} is not Python: {error}", "pass the path of a training script")


def _in_paddle(path: Path, script: ScriptFacts, policy: Policy, style: PatchStyle) -> Patch:
    """Patch a script that trains in Paddle, in its own loop or by ``paddle.Model``."""
    if style == "mezzo":
        unclear("the script trains in Paddle, and mezzo.Session in PyTorch", "choose the style auto")
    if policy.compute == "tf32":
        unclear(
            "Paddle computes FP32 products in TF32 on GPUs that have it", "set NVIDIA_TF32_OVERRIDE=0 to turn it off"
        )
    job = PatchJob(script, policy)
    if paddle.preparations(script):
        return _finish(path, job, paddle.patch_fit, "paddle_fit", "paddle.amp")
    if not script.backwards:
        unclear(
            "no training loop was found: neither a call to backward() nor paddle.Model.prepare()",
            "pass the file that has the loop, or put its forward pass under paddle.amp.auto_cast by hand",
        )
    if paddle.has_own(script):
        return _finish(path, job, paddle.patch_own, "own_amp", "paddle.amp")
    return _finish(path, job, paddle.patch_loop, _kind(script), "paddle.amp")


def _loop(path: Path, script: ScriptFacts, policy: Policy, style: PatchStyle) -> Patch:
    """Patch a loop that calls torch directly."""
    if script.uses("mezzo.Session"):
        unclear("already uses mezzo.Session", f'set its policy="{policy}"', already=True)
    if not script.backwards:
        unclear(
            "no training loop was found: neither a call to backward() nor a trainer that Mezzo knows",
            "pass the file that has the loop, or put its forward pass under torch.autocast by hand",
        )
    if torch_amp.has_own(script):
        return _finish(path, PatchJob(script, policy), torch_amp.patch_own, "own_amp", "torch.amp")
    why_not = torch_amp.why_not_expressed(policy)
    if style == "torch.amp" or (style == "auto" and not why_not):
        if why_not:
            unclear(f"policy {policy}: {why_not}", "choose the style mezzo, or another policy")
        try:
            return _finish(path, PatchJob(script, policy), torch_amp.patch_loop, _kind(script), "torch.amp")
        except Unclear as refusal:
            if style == "torch.amp" or not refusal.refused.only_in_style:
                raise
            why_not = refusal.refused.reason
    job = PatchJob(script, policy)
    if why_not:
        job.note("style", "mezzo.Session", why_not)
    return _finish(path, job, session.patch_loop, _kind(script), "mezzo")


def _kind(script: ScriptFacts) -> LoopKind:
    """Return what kind of loop a script has: the feature that matters most to a patch."""
    if len({step.name for step in script.steps}) > 1:
        return "gan"
    nested = [s for s in script.steps if isinstance(script.tree.parent.get(s.stmt), ast.If)]
    blocks = [script.tree.block(b.stmt) for b in script.backwards]
    if nested and not any(script.tree.block(s.stmt) in blocks for s in nested):
        return "accumulation"
    compiled = {ast.unparse(owner) for _, owner in script.tree.method_calls("compile")}
    if script.calls_to(r"torch\.compile") or compiled & script.models:
        return "compiled"
    return "clipping" if any(script.is_clip(call) for call in script.tree.calls) else "plain"


def _finish(path: Path, job: PatchJob, edit: Callable[[PatchJob], None], kind: LoopKind, style: WrittenStyle) -> Patch:
    edit(job)
    patched = job.editor.result()
    try:
        ast.parse(patched)
    except SyntaxError as error:
        unclear(f"the patched text would not compile, at line {error.lineno}: {error.msg}", "patch this script by hand")
    return Patch(
        path=path,
        source=job.text.text,
        patched=patched,
        diff=unified(job.text.text, patched, _name(path)),
        kind=kind,
        style=style,
        reasons=job.reasons,
        encoding=job.text.encoding,
    )


def _name(path: Path) -> str:
    """Return a file's name in a diff: its path relative to the current folder, or its bare name if it is elsewhere."""
    absolute = path.absolute()
    inside = absolute.is_relative_to(Path.cwd())
    return (absolute.relative_to(Path.cwd()) if inside else Path(path.name)).as_posix()


_MOST_FILES = 100


def neighbour_with_loop(path: Path) -> Path | None:
    """Return the one imported file next to a script that trains; None if there is none.

    Raises:
        Unclear: several files train.
    """
    folder, waiting, seen = path.absolute().parent, [path.absolute()], set[Path]()
    with_loop: list[Path] = []
    while waiting and len(seen) < _MOST_FILES:
        here = waiting.pop(0)
        if here in seen:
            continue
        seen.add(here)
        try:
            script = ScriptFacts(Text.read(here))
        except (Unclear, SyntaxError, ValueError):
            continue
        trains = script.backwards or frameworks.trainer_of(script) is not None or paddle.preparations(script)
        if here != path.absolute() and trains:
            with_loop.append(here)
        waiting += [file for name in _imported(script.tree.module) for file in _files(folder, here.parent, name)]
    if len(with_loop) > 1:
        names = ", ".join(file.name for file in with_loop)
        unclear(f"several files next to {path.name} have training loops: {names}", "pass the one to patch")
    return with_loop[0] if with_loop else None


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names)


def _files(script_folder: Path, folder: Path, name: str) -> list[Path]:
    parts = [part for part in name.split(".") if part]
    places = [place.joinpath(*parts) for place in (script_folder, folder) if parts]
    return [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
