"""Reference pages that are generated from the code: one per command, from its help, and one per public module, from its docstrings.

They exist while the site is built and are removed afterwards, so that nothing in docs/ can differ from the code.
"""

from __future__ import annotations

import importlib
import logging
import re
import shutil
from pathlib import Path
from typing import Any

FOLDER = "reference"
MODULES = {
    "mezzo": "",
    "mezzo.compat.grad_scaler": "GradScaler",
    "mezzo.compat.lightning": "MezzoPrecision MezzoFabricPrecision",
    "mezzo.compat.accelerate": "MezzoAccelerator",
    "mezzo.compat.transformers": "MezzoTrainer MezzoTrainerMixin",
    "mezzo.compat.apex.amp": "initialize scale_loss master_params state_dict load_state_dict",
    "mezzo.compat.apex.optimizers": "FusedAdam FusedSGD",
}
"""Public modules and their names; mezzo's are what it exports."""


def write(docs: Path) -> None:
    """Write all pages into ``docs/reference``."""
    from typer.main import get_command

    from mezzo.cli.parser import app

    remove(docs)
    folder = docs / FOLDER
    folder.mkdir()
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        (folder / f"command-{name}.md").write_text(command_page(name, command, docs), encoding="utf-8")
    for module, names in MODULES.items():
        (folder / f"module-{module}.md").write_text(module_page(module, names.split()), encoding="utf-8")


def remove(docs: Path) -> None:
    """Remove the pages that ``write`` wrote."""
    shutil.rmtree(docs / FOLDER, ignore_errors=True)


def pages(kind: str, docs: Path) -> list[str]:
    """Return the names of the pages of a kind, ``command`` or ``module``, as a tree of contents lists them."""
    return sorted(f"{FOLDER}/{path.stem}" for path in (docs / FOLDER).glob(f"{kind}-*.md"))


def command_page(name: str, command: Any, docs: Path) -> str:
    """Return the page of a command."""
    context = command.context_class(command, info_name=f"mezzo {name}")
    usage = re.sub(r"^Usage: ", "", command.get_usage(context))
    usage = re.sub(r"\[?(\[\w+\])\]?(?:\.\.\.)?|{([\w.]+)}", lambda found: found[1] or found[2], usage).replace("......", "...")
    entries: dict[str, list[str]] = {"argument": [], "option": []}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            entries[parameter.param_type_name].append(entry(*record))
    parts = [
        f"# `mezzo {name}`",
        command.help,
        f"    {usage}",
        guides(name, docs),
        *([f"## Arguments\n\n{''.join(entries['argument'])}"] if entries["argument"] else []),
        "## Options\n\nMezzo's options go before the script; everything after the script is passed to it.\n\n"
        if entries["argument"]
        else "## Options\n\n",
        "".join(entries["option"]),
        exit_code_part(name, docs),
    ]
    return "\n\n".join(parts) + "\n"


def entry(words: str, text: str) -> str:
    """Return a parameter as an entry of a definition list."""
    return f"`{re.sub(r' <[^>]+>', '', words)}`\n: {escaped(text)}\n\n"  # without the parser's names of types


def escaped(text: str) -> str:
    """Return plain text so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", text)


def guides(name: str, docs: Path) -> str:
    """Return the line with the guides to a command: those that docs/commands.md names."""
    table = (docs / "commands.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `mezzo {name}` \|.*\| (.+) \|$", table, re.M)
    if row is None:
        raise SystemExit(f"docs/commands.md has no row for mezzo {name}")
    return f"Guide: {relinked(row[1])}. All exit codes: [exit codes](../exit-codes.md)."


def relinked(text: str) -> str:
    """Return Markdown whose links work from a page one folder further down."""
    return re.sub(r"\]\((?!http)", "](../", text)


def exit_code_part(name: str, docs: Path) -> str:
    """Return the meaning of a command's exit codes, from the table of docs/exit-codes.md."""
    text = (docs / "exit-codes.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{name}` \|.*$", text, re.M)
    if row is None:
        raise SystemExit(f"docs/exit-codes.md has no row for {name}")
    heads = ("0", "1", "any other, the script's own")
    cells = [cell.strip() for cell in row[0].strip("|").split("|")[1:]]
    shown = ["if the script fails" if cell == "yes" else cell for cell in cells]
    lines = [f"- **{head}**: {cell}" for head, cell in zip(heads, shown, strict=True) if cell]
    return "## Exit codes\n\n" + relinked("\n".join(lines))


def module_page(module: str, names: list[str]) -> str:
    """Return the page of a module: each name with its docstring, a class with its public methods."""
    logging.disable(logging.WARNING)  # other libraries warn about kernels that they lack
    try:
        found = importlib.import_module(module)
    finally:
        logging.disable(logging.NOTSET)
    shown = names or dir(found)
    lines = [f"# `{module}`", "", "```{eval-rst}"]
    lines += [line for name in shown for line in directive(module, name, getattr(found, name))]
    return "\n".join([*lines, "```", ""])


def directive(module: str, name: str, thing: object) -> list[str]:
    """Return the directive that documents a name."""
    if not isinstance(thing, type):
        return [f".. autofunction:: {module}.{name}", ""]
    return [f".. autoclass:: {module}.{name}", "   :members:", "   :show-inheritance:", ""]
