"""A plugin of mypy that reports where a file reaches into an object of a class that another file of Mezzo defines.

That is: it sets an attribute, reads a private name, or goes round both with ``setattr`` or ``__dict__``. mypy knows the types, so an
object of torch or of the user is no false alarm, and another name for the object no way round. Limit: it says nothing about values
that are annotated with ``Any``.

A value without methods, such as the state of a thread or a finding that is built up, has nothing to protect: files of the folder that
defines it may set its attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mypy.errorcodes import ErrorCode
from mypy.nodes import CallExpr, Decorator, Expression, NameExpr, SuperExpr, SymbolNode, Var
from mypy.plugin import AttributeContext, FunctionContext, MethodSigContext, Plugin
from mypy.types import FunctionLike, Instance, Type, get_proper_type

REACH = ErrorCode("reach", "A file reaches into an object of another file", "Mezzo")
OF_NAMEDTUPLE = {"_replace", "_asdict", "_make", "_fields", "_field_defaults"}


class Reaches(Plugin):
    """The reports of one run of mypy."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """Report an attribute that is set, or a private one that is read."""
        owner, _, name = fullname.rpartition(".")
        if not fullname.startswith("mezzo.") and name != "__dict__":
            return None

        def report(ctx: AttributeContext) -> Type:
            base = getattr(ctx.context, "expr", None)
            if name == "__dict__":
                _report_if_foreign(ctx.api, ctx.context, base, _class_of(ctx.type), name)
            elif _is_private(name) or (ctx.is_lvalue and not _is_value_of_folder(ctx.type, owner, ctx.api)):
                _report_if_foreign(ctx.api, ctx.context, base, owner, name)
            return ctx.default_attr_type

        return report

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        """Report a call of a private method."""
        owner, _, name = fullname.rpartition(".")
        if not fullname.startswith("mezzo.") or not _is_private(name):
            return None

        def report(ctx: MethodSigContext) -> FunctionLike:
            called = ctx.context.callee if isinstance(ctx.context, CallExpr) else None
            _report_if_foreign(ctx.api, ctx.context, getattr(called, "expr", None), owner, name)
            return ctx.default_signature

        return report

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        """Report an attribute that is set or deleted by a function."""
        if fullname not in ("builtins.setattr", "builtins.delattr"):
            return None

        def report(ctx: FunctionContext) -> Type:
            owner = _class_of(ctx.arg_types[0][0])
            _report_if_foreign(ctx.api, ctx.context, ctx.args[0][0], owner, fullname.rpartition(".")[2])
            return ctx.default_return_type

        return report


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMEDTUPLE


def _class_of(kind: Type) -> str:
    proper = get_proper_type(kind)
    return proper.type.fullname if isinstance(proper, Instance) else ""


def _is_value_of_folder(kind: Type, owner: str, api: Any) -> bool:
    """Return whether an object is of a class without methods, which the folder of the file that is checked defines, or one around it."""
    proper, folder = get_proper_type(kind), owner.rpartition(".")[0].rpartition(".")[0]
    if not isinstance(proper, Instance) or not f"{api.tree.fullname}.".startswith(f"{folder}."):
        return False
    ours = [info for info in proper.type.mro if info.fullname.startswith("mezzo.")]
    named = [(name, symbol.node) for info in ours for name, symbol in info.names.items()]
    return not any(
        isinstance(n, (SymbolNode, Decorator)) and not isinstance(n, Var) and name[:2] != "__" for name, n in named
    )


def _report_if_foreign(api: Any, where: Any, base: Expression | None, owner: str, name: str) -> None:
    """Report an access unless the object is the method's own, or its class of this file; ``owner`` is the class's full name."""
    own = isinstance(base, SuperExpr) or (
        isinstance(base, NameExpr) and isinstance(base.node, Var) and (base.node.is_self or base.node.is_cls)
    )
    module = owner.rpartition(".")[0]
    if not own and owner.startswith("mezzo.") and module != api.tree.fullname:
        api.msg.fail(f"{owner}.{name}", where, code=REACH)


def plugin(version: str) -> type[Plugin]:
    """Return the plugin, for mypy."""
    return Reaches
