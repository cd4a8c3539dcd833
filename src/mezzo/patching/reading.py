"""A training script, read from its syntax tree: its models, optimizers, schedules, backward passes and updates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mezzo.patching.text import Text
from mezzo.patching.tree import SyntaxTree, flat

_OPTIMIZER_NAME = re.compile(
    r"(^|[._])(opt|optim)(_\w+|[A-Z]\w*|\d*)?$|optimi[sz]er|_opt$|_optim$|^opt[A-Z]|^trainer_[gd]$"
)
_SCHEDULER_NAME = re.compile(r"sched|(^|_)lr_?(policy|decay)", re.IGNORECASE)
_MODULE_ONLY = ("parameters", "named_parameters", "train", "eval", "named_modules")
"""Methods that mark their owner as a module."""
_NO_FORWARD = (
    *_MODULE_ONLY,
    *(
        "to",
        "cuda",
        "cpu",
        "zero_grad",
        "state_dict",
        "load_state_dict",
        "requires_grad_",
        "apply",
        "modules",
        "children",
    ),
    *(
        "register_hook",
        "register_forward_hook",
        "register_buffer",
        "share_memory",
        "compile",
        "double",
        "float",
    ),
    *("add_module", "no_sync", "configure_optimizers", "init_weights", "save", "load"),
)
CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value", "clip_grads_with_norm_")


@dataclass(frozen=True)
class Backward:
    """One backward pass: ``loss.backward()`` or ``torch.autograd.backward(loss)``."""

    call: ast.Call
    loss: ast.expr
    stmt: ast.stmt


@dataclass(frozen=True)
class StepCall:
    """One call of an optimizer's ``step``, or of Paddle's ``minimize``."""

    call: ast.Call
    optimizer: ast.expr
    stmt: ast.stmt

    @property
    def name(self) -> str:
        """The optimizer as text."""
        return ast.unparse(self.optimizer)

    @property
    def has_closure(self) -> bool:
        """Whether the optimizer calls a function that computes the loss."""
        return not self.minimizes and bool(self.call.args or self.call.keywords)

    @property
    def minimizes(self) -> bool:
        """Whether the call is ``minimize(loss)``, which also takes a loss but differentiates nothing."""
        return isinstance(self.call.func, ast.Attribute) and self.call.func.attr == "minimize"


class ScriptFacts:
    """The facts about one file that decide its patch."""

    def __init__(self, text: Text) -> None:
        self.text, self.tree = text, SyntaxTree(text.text)

    @cached_property
    def library(self) -> Library:
        """The library whose functions the script calls: Paddle if it imports it, else PyTorch."""
        roots = {name.split(".")[0] for name in self.tree.imported.values()}
        return PADDLE if PADDLE.package in roots else TORCH

    # --- objects, by the text of the expressions that refer to them ---------------------------------------------------

    @cached_property
    def assigned_calls(self) -> list[tuple[str, ast.Call]]:
        """Each name or attribute that is assigned a call, with the call."""
        found = []
        for node in self.tree.nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name, value in (pair for target in targets for pair in _pairs(target, node.value)):
                    found += [(name, part) for part in _alternatives(value) if isinstance(part, ast.Call)]
        return found

    def owners_of(self, *methods: str) -> set[str]:
        """Return the expressions on which one of these methods is called."""
        return {ast.unparse(owner) for _, owner in self.tree.method_calls(*methods)}

    @cached_property
    def module_classes(self) -> set[str]:
        """The classes of this file that are modules."""
        classes = [n for n in self.tree.nodes if isinstance(n, ast.ClassDef)]
        found: set[str] = set()
        for _ in classes:
            found |= {c.name for c in classes if any(self._is_module_class(b, found) for b in c.bases)}
        return found

    def _is_module_class(self, base: ast.expr, known: set[str]) -> bool:
        name = self.tree.dotted(base)
        library, last = self.library, name.rpartition(".")[2]
        return name in known or name.startswith(library.layer_bases) or last.endswith(library.layer_suffix)

    @cached_property
    def models(self) -> set[str]:
        """Names of modules: models, their parts and loss functions."""
        found = {owner for owner in self.owners_of(*_MODULE_ONLY) if re.fullmatch(r"[\w.]+", owner)}
        for name, call in self.assigned_calls:
            callee = self.tree.dotted(call.func)
            if callee in self.module_classes or self.library.layer.match(callee):
                found.add(name)
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda", "train"):
                found |= {name} if ast.unparse(call.func.value) in found else set()
        return found - self.optimizers - {"self"}

    @cached_property
    def optimizers(self) -> set[str]:
        """Names of optimizers: created as one, or used like one."""
        created = {name for name, call in self.assigned_calls if self.creates_optimizer(call)}
        stepped = self.owners_of(*self.library.updates)
        zeroed = self.owners_of(*self.library.clears) - self.owners_of(*_MODULE_ONLY)
        named = {owner for owner in stepped if _OPTIMIZER_NAME.search(owner)}
        found = {o for o in created | (stepped & zeroed) | named if not self._is_scheduler(o)}
        loops = [n for n in self.tree.nodes if isinstance(n, ast.For) and isinstance(n.target, ast.Name)]
        over = [n for n in loops if {m.id for m in ast.walk(n.iter) if isinstance(m, ast.Name)} & found]
        found |= {n.target.id for n in over if isinstance(n.target, ast.Name) and n.target.id in stepped}
        return found

    def creates_optimizer(self, call: ast.Call) -> bool:
        """Return whether a call creates an optimizer of the library, Mezzo or transformers."""
        return bool(self.library.optimizer.match(self.tree.dotted(call.func)))

    @cached_property
    def _created_schedulers(self) -> set[str]:
        callees = {name: self.tree.dotted(call.func) for name, call in self.assigned_calls}
        creates = self.library.schedule
        return {name for name, callee in callees.items() if creates.search(callee) or _SCHEDULER_NAME.search(callee)}

    def _is_scheduler(self, owner: str) -> bool:
        return owner in self._created_schedulers or bool(_SCHEDULER_NAME.search(owner))

    # --- the calls of a training step -----------------------------------------------------------------------------------

    @cached_property
    def backwards(self) -> list[Backward]:
        """The backward passes of a loop that calls the library directly."""
        found = []
        for call in self.tree.calls:
            if self.tree.dotted(call.func) == self.library.backward and call.args:
                found.append(Backward(call, call.args[0], self.tree.statement(call)))
            elif isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
                owner = ast.unparse(call.func.value)
                if owner in ("self", "super()", "fabric", "accelerator", "session", "torch.autograd"):
                    continue
                if owner.endswith((".fabric", ".accelerator", ".session")) or owner in self._classes:
                    continue
                found.append(Backward(call, call.func.value, self.tree.statement(call)))
        return found

    @cached_property
    def _classes(self) -> set[str]:
        return {n.name for n in self.tree.nodes if isinstance(n, ast.ClassDef)}

    @cached_property
    def steps(self) -> list[StepCall]:
        """The updates: every call of an optimizer's ``step``, or of Paddle's ``minimize``."""
        calls = self.tree.method_calls(*self.library.updates)
        return [
            StepCall(call, owner, self.tree.statement(call)) for call, owner in calls if self._names_optimizer(owner)
        ]

    def _names_optimizer(self, owner: ast.expr) -> bool:
        base = owner.value if isinstance(owner, ast.Subscript) else owner
        return bool({ast.unparse(owner), ast.unparse(base)} & self.optimizers)

    @cached_property
    def schedule_steps(self) -> list[ast.Call]:
        """The calls of a schedule's ``step``."""
        return [call for call, owner in self.tree.method_calls("step") if self._is_scheduler(ast.unparse(owner))]

    # --- what statements do ------------------------------------------------------------------------------------------------

    def runs_forward(self, node: ast.AST, *, functional: bool = True, depth: int = 4) -> bool:
        """Return whether code calls a model or a loss function, itself or in the functions of this file that it calls.

        Without ``functional``, calls of the library's functions do not count.
        """
        for inner in ast.walk(node):
            if functional and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.MatMult):
                return True
            if isinstance(inner, ast.Call) and self._is_forward(inner, functional, depth):
                return True
        return False

    def _is_forward(self, call: ast.Call, functional: bool, depth: int) -> bool:
        name = self.tree.dotted(call.func)
        if name.startswith(self.library.functional):
            return functional and not name.endswith((".pad", ".one_hot"))
        text = ast.unparse(call.func)
        if text in self.models or (functional and name in self.library.products):
            return True
        if isinstance(call.func, ast.Attribute):
            owner, method = ast.unparse(call.func.value), call.func.attr
            has_arguments = bool(call.args or call.keywords)
            if owner in self.models and has_arguments and method not in _NO_FORWARD and not method.startswith("_"):
                return True
        called = self.functions_called(call) if depth > 0 else []
        return any(self.runs_forward(f, functional=functional, depth=depth - 1) for f in called)

    def functions_called(self, call: ast.Call) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return the functions of this file that a call may run."""
        if isinstance(call.func, ast.Name):
            return [f for f in self._functions.get(call.func.id, []) if not self._is_method(f)]
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self":
            return [f for f in self._functions.get(call.func.attr, []) if self._is_method(f)]
        return []

    @cached_property
    def _functions(self) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
        found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for node in self.tree.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(node.name, []).append(node)
        return found

    def _is_method(self, function: ast.AST) -> bool:
        return isinstance(self.tree.parent.get(function), ast.ClassDef)

    def grads_off(self, stmt: ast.AST) -> bool:
        """Return whether a statement is a ``with`` block without gradients, or a function with such a decorator."""
        names: list[ast.expr] = []
        if isinstance(stmt, (ast.With, ast.AsyncWith)):
            names = [item.context_expr for item in stmt.items]
        elif isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = list(stmt.decorator_list)
        return any(
            self.tree.dotted(n.func if isinstance(n, ast.Call) else n) in self.library.gradients_off for n in names
        )

    def is_clip(self, call: ast.Call) -> bool:
        """Return whether a call clips gradients."""
        return self.tree.dotted(call.func).rpartition(".")[2] in CLIPS

    def reads_gradients(self, node: ast.AST) -> bool:
        """Return whether code clips, reads or changes gradients: ``.grad``, or parameters passed to a function."""
        for inner in ast.walk(node):
            named_grad = isinstance(inner, ast.Attribute) and inner.attr == "grad"
            if named_grad and self.tree.dotted(inner) != "torch.autograd.grad":
                return True
            if isinstance(inner, ast.Call) and (self.is_clip(inner) or self._is_passed_parameters(inner)):
                return True
        return False

    def _is_passed_parameters(self, call: ast.Call) -> bool:
        if self.creates_optimizer(call) or self.tree.dotted(call.func) in ("iter", "next", "len"):
            return False
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        called = [a.func for a in arguments if isinstance(a, ast.Call)]
        return any(isinstance(func, ast.Attribute) and func.attr == "parameters" for func in called)

    # --- mixed precision that the script already has ---------------------------------------------------------------------

    def calls_to(self, pattern: str) -> list[ast.Call]:
        """Return the calls of functions whose whole dotted name matches a regular expression."""
        return [call for call in self.tree.calls if re.fullmatch(pattern, self.tree.dotted(call.func))]

    @cached_property
    def autocasts(self) -> list[ast.Call]:
        """The script's own autocast regions."""
        return self.calls_to(self.library.autocast)

    @cached_property
    def scalers(self) -> list[ast.Call]:
        """The calls that create loss scalers."""
        return self.calls_to(r".*GradScaler|paddle\..*AmpScaler")

    def uses(self, *names: str) -> list[ast.expr]:
        """Return the expressions that name one of these functions or classes."""
        found = [n for n in self.tree.nodes if isinstance(n, (ast.Name, ast.Attribute))]
        return [n for n in found if self.tree.dotted(n) in names]


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield each target's text with the expression that is assigned to it."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for target_part, value_part in zip(target.elts, value.elts, strict=True):
            yield from _pairs(target_part, value_part)
    else:
        yield from ((ast.unparse(part), value) for part in flat(target))


def _alternatives(value: ast.expr) -> Iterator[ast.expr]:
    """Yield what an assigned expression may be: both sides of ``a if c else b``, the parts of a tuple."""
    if isinstance(value, ast.IfExp):
        yield from (*_alternatives(value.body), *_alternatives(value.orelse))
    elif isinstance(value, (ast.Tuple, ast.List)):
        for element in value.elts:
            yield from _alternatives(element)
    elif isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        yield value.elt
    else:
        yield value


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library's names, as dotted names or as regular expressions that match the beginning of one."""

    package: str
    layer: re.Pattern[str]
    """Creates a layer, a loss function or a model."""
    layer_bases: str
    """The package of the classes that a model inherits from."""
    layer_suffix: str
    """How the name of a class that is a model ends, wherever it comes from."""
    functional: str
    """The package of layers as functions."""
    products: tuple[str, ...]
    optimizer: re.Pattern[str]
    """Creates an optimizer."""
    schedule: re.Pattern[str]
    """Is found in the name of what creates a schedule."""
    clears: tuple[str, ...]
    """Methods of an optimizer that clear the gradients."""
    updates: tuple[str, ...]
    """Methods of an optimizer that update the weights."""
    gradients_off: tuple[str, ...]
    autocast: str
    """Matches the whole name of a region of mixed precision."""
    compiler: str
    """Compiles a model or a function."""
    backward: str
    """Is passed what to differentiate."""


TORCH = Library(
    package="torch",
    layer=re.compile(r"torch\.nn\.(?!functional|utils|init|Parameter)|torch\.compile$"),
    layer_bases="torch.nn.",
    layer_suffix="Module",
    functional="torch.nn.functional.",
    products=("torch.matmul", "torch.bmm", "torch.mm", "torch.einsum"),
    optimizer=re.compile(
        r"(torch\.optim|mezzo|transformers\.optimization)\.(?!lr_scheduler)(\w+\.)?(?!(Session|Policy)$)[A-Z]"
    ),
    schedule=re.compile(r"lr_scheduler"),
    clears=("zero_grad",),
    updates=("step",),
    gradients_off=("torch.no_grad", "torch.inference_mode"),
    autocast=r"torch\.(cuda\.|cpu\.)?(amp\.)?(autocast_mode\.)?autocast",
    compiler="torch.compile",
    backward="torch.autograd.backward",
)
PADDLE = Library(
    package="paddle",
    layer=re.compile(r"paddle\.(nn\.(?!functional|utils|initializer|Clip)|vision\.models\.|DataParallel$)"),
    layer_bases="paddle.nn.",
    layer_suffix="Layer",
    functional="paddle.nn.functional.",
    products=("paddle.matmul", "paddle.bmm", "paddle.mm", "paddle.einsum"),
    optimizer=re.compile(r"paddle\.(incubate\.)?optimizer\.(?!lr\.)(\w+\.)*[A-Z]"),
    schedule=re.compile(r"^paddle\.optimizer\.lr\."),
    clears=("clear_grad", "clear_gradients"),
    updates=("step", "minimize"),
    gradients_off=("paddle.no_grad",),
    autocast=r"paddle\.amp\.(auto_cast\.)?(auto_cast|autocast|amp_guard)",
    compiler="paddle.jit.to_static",
    backward="paddle.autograd.backward",
)
LIBRARIES = (TORCH, PADDLE)
