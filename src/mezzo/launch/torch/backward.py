"""Scale a script's gradients inside its backward passes, so that the script never sees a scaled one.

``torch.autograd.backward`` (every ``loss.backward()`` ends there) starts from ``gradient * scale`` instead of
``gradient``, so the loss that the script logs is not scaled. Every leaf of the graph has a hook that divides by the scale
before the gradient is added to ``.grad``, so clipping, accumulation, gradient penalties and DDP's all-reduce see
unscaled gradients. The leaves are found by walking the graph, since a missed leaf would get a gradient 65536
times too large. That costs about a microsecond per node, only if the loss is scaled.

``torch.autograd.grad`` starts from a scaled gradient as well. Its results are unscaled before it returns, and keep their graph for
penalties that build on them. The script may compute with them, as MAML's fast weights do, so a pass that overflows is repeated with a
smaller scale, unless its results are known to be the gradients of an update. If these are not the gradients of parameters that the
script trains, the pass has a scale of its own.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.engine.casts.registration import unwrapped
from mezzo.engine.gradients import DirectPasses, all_finite, trained_leaves
from mezzo.engine.matrix_units.emulation_nodes import stands_for
from mezzo.engine.scaling import Scale
from mezzo.errors import NonFiniteLossError
from mezzo.launch.patches import Patches
from mezzo.launch.torch.communication import Communication
from mezzo.launch.torch.state import TorchRun
from mezzo.launch.torch.update_losses import WITHOUT_MODE_CHECK, given_gradients, leaves_of, listed, reusable, weighted
from mezzo.observe.source_lines import own_line


class BackwardPasses:
    """Replacements for torch's two entries to the backward pass."""

    def __init__(self, run: TorchRun, communication: Communication) -> None:
        self._run, self._communication = run, communication
        self._inverse: Tensor | None = None
        """Factor that unscales gradients at the leaves; None outside a scaled ``backward``."""
        self._hooked = WeakTensorKeyDictionary()
        self._hook_numbers: set[int] = set()
        """Ids of our own hooks: comparing them is 30 times faster than inspecting the hooks."""
        self._views = UnscaledViews(lambda: self._inverse, on_hook=run.steady_state.batched.disable)

    def install(self, patches: Patches) -> None:
        """Replace both entries until ``patches`` are undone."""
        patches.wrap(torch.autograd, "backward", self._backward)
        patches.wrap(torch.autograd, "grad", self._grad)
        for name in ("backward", "grad"):  # a compiled step with a backward pass inside must not trace our replacements
            disable = functools.partial(patches.wrap, torch.autograd, name, torch.compiler.disable)
            self._run.phase.before_compiling.append(disable)
        if self._run.precision.effective is not None and self._run.precision.effective.loss_scale != "none":
            self._views.install(patches)
            self._run.steady_state.batched.install(patches, self._unhook_leaf)
        patches.on_undo(self._unhook)

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Under a function mode, torch's own function would call this replacement.
        run_engine = WITHOUT_MODE_CHECK.get(original, original)
        run, steady_state = self._run, self._run.steady_state
        batched, calls = steady_state.batched, steady_state.scaler_calls
        run_steady = DirectPasses(run_engine) if original in WITHOUT_MODE_CHECK else run_engine

        @functools.wraps(original)
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            rest = retain_graph, create_graph, grad_variables, inputs
            begins_step = (
                run.update.stepped and grad_tensors is None and not (run.phase.in_backward or run.update.in_closure)
            )
            optimizer, start = steady_state.optimizer() if begins_step else None, None
            if optimizer is not None and run.precision.scale.skips_overflows:
                usual = inputs is None and not (retain_graph or create_graph)
                if usual and run.update.overflowed is False and run.precision.scale.calm > 0:
                    start = batched.start_of(tensors, optimizer)
                optimizer = None if start is None else optimizer
            loss: Any = tensors
            also: tuple[Any, ...] = ()
            if optimizer is not None and calls.scaler is not None:
                optimizer = optimizer if tensors is calls.scaled else None
                loss, also = calls.take_loss()
            if optimizer is not None and run.update.recorder.advance(loss, also):
                run.update.stepped = run.update.skipped = False
                if start is not None:
                    run.update.overflowed = None
                    run.precision.scale.calm -= 1
                if run.limit is not None or (run.guard is not None and run.update.recorder.num_closed >= run.guard.due):
                    run.check_limit()
                run.phase.in_backward = True
                try:
                    run_steady(tensors, start, *rest)
                finally:
                    run.phase.in_backward = False
                    if start is not None:
                        batched.unscale(optimizer, self._unscaled_at_scale)
                return
            batched.forget()
            self._run_with_hooks(run_engine, tensors, grad_tensors, rest)

        return backward

    def _run_with_hooks(
        self, run_engine: Callable[..., Any], tensors: Any, grad_tensors: Any, rest: tuple[Any, Any, Any, Any]
    ) -> None:
        """Run a backward pass that is hooked and recorded in full; ``rest`` are the later arguments of ``torch.autograd.backward``."""
        run, (retain_graph, create_graph, _, inputs) = self._run, rest
        if run.phase.not_training:
            with run.graphs.unrecorded():
                run_engine(tensors, grad_tensors, *rest)
            return
        tensors, grad_tensors = reusable(tensors), reusable(grad_tensors)
        outputs = listed(tensors)
        if run.objects.existing:
            run.objects.existing.reached(
                leaves_of([t for t in outputs if isinstance(t, Tensor)]), run.update.num_updates
            )
        if run.phase.in_backward or False in [isinstance(t, Tensor) for t in outputs]:
            self._hook_recomputed(outputs)
            run_engine(tensors, grad_tensors, *rest)
            return
        self._begin(outputs, grad_tensors, keeps_graph=bool(retain_graph or create_graph))
        run.lint.backward_begins(outputs, grad_tensors, keeps_graph=bool(retain_graph or create_graph))
        by_hand = [] if run.objects.optimizers else [leaf for leaf in leaves_of(outputs) if leaf.requires_grad]
        run.by_hand.reached(by_hand)
        casting = run.precision.main_casting
        before = self._communication.before_backward(
            lambda: [leaf for leaf in leaves_of(outputs) if isinstance(leaf, torch.nn.Parameter)]
        )
        if run.precision.scale.skips_overflows:
            with self._scaling(outputs, inputs), self._under_policy():
                run_engine(outputs, self._scaled(outputs, grad_tensors, run.precision.scale), *rest)
        elif casting is not None and casting.table is not None:
            with self._under_policy():
                run_engine(outputs, grad_tensors, *rest)
        else:  # nothing to set, so three contexts need not be entered
            run.phase.in_backward = True
            try:
                run_engine(outputs, grad_tensors, *rest)
            finally:
                self._end()
        self._communication.after_backward(before)
        run.lint.backward_ended()
        run.losses.pass_ended()
        if by_hand and not run.objects.optimizers:  # a nested backward pass may have reached one
            run.made_by_hand([p.grad for p in by_hand if p.grad is not None])

    def _grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        run_engine = WITHOUT_MODE_CHECK.get(original, original)

        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._run.phase.not_training:
                with self._run.graphs.unrecorded():
                    return run_engine(outputs, inputs, grad_outputs, *args, **kwargs)
            outputs, inputs, grad_outputs = reusable(outputs), reusable(inputs), reusable(grad_outputs)
            roots, leaves = listed(outputs), listed(inputs)
            tracing = torch._guards.TracingContext.try_get() is not None  # torch.compile is deriving a backward pass
            if tracing or self._run.phase.in_backward or not all(isinstance(t, Tensor) for t in (*roots, *leaves)):
                with self._inside_pass():
                    return run_engine(outputs, inputs, grad_outputs, *args, **kwargs)
            if self._run.objects.existing:
                self._run.objects.existing.reached(leaves_of(roots), self._run.update.num_updates)
            self._note_transformed(roots, leaves)
            if not self._trains(leaves, args, kwargs):
                return self._inner_gradients(run_engine, roots, inputs, grad_outputs, *args, **kwargs)
            self._begin(roots, grad_outputs)
            if not self._run.objects.optimizers:
                self._run.by_hand.reached(leaves)
            # An update's gradients may overflow: it is skipped, and its graph need not be kept.
            of_update = not self._run.objects.optimizers or self._run.losses.are_of_update()
            compute = functools.partial(run_engine, roots, inputs)
            gradients = self._gradients(
                compute, roots, grad_outputs, self._run.precision.scale, args, kwargs, repeats=not of_update
            )
            found = [g for g in listed(gradients) if g is not None]
            self._communication.returned(found)
            self._run.losses.returned(found)
            if not self._run.objects.optimizers:
                self._run.made_by_hand(found)
            return gradients

        return grad

    def _note_transformed(self, roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Record the loss whose gradients ``torch.func`` computes; under ``vmap``, the mean loss over the samples.

        The gradients belong to an update if their leaves are an optimizer's parameters, or detached tensors that share their memory.
        """
        if not retrieve_all_functorch_interpreters() or len(roots) != 1 or roots[0].numel() != 1:
            return
        trained = {p.data_ptr() for o in self._run.objects.optimizers for p in trained_leaves(o)}
        if any(unwrapped(leaf).data_ptr() in trained for leaf in leaves):
            self._run.update.transformed.append(unwrapped(roots[0]).detach().mean())

    def _inner_gradients(
        self, run_engine: Callable[..., Any], roots: list[Tensor], inputs: Any, given: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return gradients that the script computes with, as in a penalty."""
        scale = self._run.precision.inner_scale
        in_vmap = _in_vmap()
        if in_vmap and scale.skips_overflows:
            why = "no value can be read there, so small ones may become 0 in FP16; BF16 needs no scale"
            self._run.notes.note_left_alone("loss scale", "gradients inside torch.func.vmap", why)
        if not scale.skips_overflows or in_vmap or kwargs.get("is_grads_batched"):
            with self._under_policy():
                return run_engine(roots, inputs, given, *args, **kwargs)
        compute = functools.partial(run_engine, roots, inputs)
        gradients = self._gradients(compute, roots, given, scale, args, kwargs, repeats=True)
        scale.updated(skipped=False)
        return gradients

    def _gradients(
        self,
        compute: Callable[..., Any],
        roots: list[Tensor],
        given: Any,
        scale: Scale,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        repeats: bool,
    ) -> Any:
        """Return unscaled gradients; if ``repeats``, repeat a pass that overflows with a smaller scale.

        The script may compute its loss with them. An overflow would make the loss itself infinite, and skipping the update would not
        help.
        """
        repeats = repeats and scale.adapts
        if repeats:  # the graph is kept
            kwargs.pop("retain_graph", None)
            args = True, *args[1:]
        while True:
            with self._under_policy():
                gradients = compute(self._scaled(roots, given, scale), *args, **kwargs)
            gradients = self._unscaled(gradients, scale)
            if not repeats or scale.at_floor():
                return gradients
            if all_finite(_values_of(listed(gradients))) or not all_finite(roots):
                return gradients
            scale.updated(skipped=True)

    def _unscaled_at_scale(self, gradient: Tensor) -> Tensor:
        return unscaled(gradient, self._run.precision.scale.inverse())

    @contextmanager
    def _scaling(self, outputs: Sequence[Tensor], inputs: Any) -> Iterator[None]:
        leaves = leaves_of(outputs)
        self._hook_leaves(leaves)
        self._inverse = self._run.precision.scale.inverse()
        try:
            if inputs is None and not self._views.any_retained:
                yield
            else:
                with self._views.of_inner_gradients(inputs):
                    yield
            self._run.dropped_updates.pass_ended(leaves)
        finally:
            self._inverse = None

    @contextmanager
    def _under_policy(self) -> Iterator[None]:
        self._run.phase.in_backward = True
        casting = self._run.precision.main_casting
        try:
            if casting is None or casting.table is None:
                yield
            else:
                with casting.backward():
                    yield
        finally:
            self._end()

    def _end(self) -> None:
        self._run.phase.in_backward = False
        for watcher in self._run.listeners.all:
            watcher.backward_ended()

    @contextmanager
    def _inside_pass(self) -> Iterator[None]:
        """Compute gradients inside a backward pass, as a solver with an adjoint does: they continue into that pass.

        So they stay scaled, also for leaves. An emulated node that computes them for itself is noted for watchers. Limit: a
        gradient that the outer pass accumulates meanwhile, in the thread of another device, stays scaled, too.
        """
        node, inverse = torch._C._current_autograd_node(), self._inverse
        self._inverse = None
        try:
            with self._run.phase.inside_node(None if stands_for(node) is None else node):
                yield
        finally:
            self._inverse = inverse

    def _begin(self, outputs: Sequence[Tensor], given: Any, *, keeps_graph: bool = False) -> None:
        """Begin an update: record the losses, each times the gradient passed for it, since WGANs start from -1."""
        run = self._run
        run.close_update()
        run.repeated_after_leaving_out()
        for watcher in run.listeners.all:
            watcher.backward_begins(outputs)
        recorder = run.update.recorder
        needs_reach = recorder.separate_losses.needs_reach or run.objects.numbers.may_need_reach(recorder.num_closed)
        reached = run.objects.numbers.reached(leaves_of(outputs)) if needs_reach else None
        name = running_loss_name() if run.objects.numbers.may_need_names(recorder.num_closed) else ""
        num_before, starts = recorder.num_open, given_gradients(outputs, given)
        for loss, gradient in zip(outputs, starts, strict=False):  # torch itself refuses other lengths
            if loss.numel() == 1:
                if not recorder.has_any_loss and not run.update.scaled_by_script:
                    _refuse_infinite(loss)
                true = self._true_loss(loss) if run.update.scaled_by_script else loss
                recorder.loss(weighted(true, gradient), reached=reached, name=name)
        if recorder.measures:
            run.losses.pass_begins(outputs, given, range(num_before, recorder.num_open), keeps_graph=keeps_graph)

    def _true_loss(self, loss: Tensor) -> Tensor:
        """Return a loss without the scale of the script's scaler."""
        scale = self._run.update.scale_on_device()
        assert scale is not None
        return loss.detach() / (scale.to(loss.device) if isinstance(scale, Tensor) else scale)

    def _scaled(self, outputs: Sequence[Tensor], given: Any, scale: Scale) -> Any:
        if not scale.skips_overflows:
            return given
        pairs = zip(outputs, given_gradients(outputs, given), strict=True)
        return [scale.scale(torch.ones_like(t) if g is None else g).to(t) for t, g in pairs]

    def _unscaled(self, gradients: Any, scale: Scale) -> Any:
        if not scale.skips_overflows:
            return gradients
        unscale = functools.partial(unscaled, inverse=scale.inverse())
        if isinstance(gradients, dict):
            return {key: None if g is None else unscale(g) for key, g in gradients.items()}
        return tuple(None if g is None else unscale(g) for g in gradients)

    # --- leaves ----------------------------------------------------------------------------------------------------------------

    def _hook_leaves(self, leaves: Sequence[Tensor]) -> None:
        for leaf in leaves:
            hooks = leaf._backward_hooks
            if hooks is None or self._hook_numbers.isdisjoint(hooks):
                earlier = dict(hooks or {})
                if hooks is not None:
                    hooks.clear()  # autograd only uses the insertion order
                handle = self._hooked[leaf] = leaf.register_hook(self._unscale)
                self._hook_numbers.add(handle.id)
                if hooks is not None:  # they run after ours: a hook that clips must see the unscaled gradient
                    hooks.update(earlier)

    def _unhook_leaf(self, leaf: Tensor) -> None:
        handle = self._hooked.pop(leaf, None)
        if handle is not None:
            handle.remove()
            self._hook_numbers.discard(handle.id)

    def _hook_recomputed(self, outputs: Sequence[Any]) -> None:
        """Hook the leaves of a nested backward pass, which the walk through the outer graph does not reach.

        Its other leaves are detached inputs: their gradients continue into the outer graph and must stay scaled.
        """
        if self._inverse is None:
            return
        leaves = leaves_of([t for t in outputs if isinstance(t, Tensor)])
        self._hook_leaves([t for t in leaves if isinstance(t, torch.nn.Parameter) or self._run.objects.owns([t])])

    def _unhook(self) -> None:
        for handle in self._hooked.values():
            handle.remove()

    @unserializable_hook  # type: ignore[untyped-decorator] # torch.save of a whole tensor would warn about it
    def _unscale(self, gradient: Tensor) -> Tensor | None:
        return None if self._inverse is None else unscaled(gradient, self._inverse)

    def _trains(self, leaves: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether gradients from ``torch.autograd.grad`` belong to an update."""
        if kwargs.get("create_graph") or True in args[1:2] or torch.compiler.is_compiling():
            return False
        return self._run.objects.owns(leaves) if self._run.objects.optimizers else all(t.is_leaf for t in leaves)


def _values_of(gradients: Sequence[Tensor | None]) -> Iterator[Tensor]:
    """Yield the values of the gradients that are not None, of a sparse one those that it has."""
    for gradient in gradients:
        if gradient is not None:
            yield gradient.detach()._values() if gradient.is_sparse else gradient.detach()


def _in_vmap() -> bool:
    """Return whether the caller runs under ``torch.func.vmap``, at any level."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())


def _refuse_infinite(loss: Tensor) -> None:
    if not bool(loss.detach().isfinite()):
        raise NonFiniteLossError(
            f"the loss is {loss.item()} before the first update",
            hint="no loss scale can help: check the data and the forward pass; compare with --policy fp32",
        )


def unscaled(gradient: Tensor, inverse: Tensor | None) -> Tensor:
    """Return ``gradient * inverse``, with NaN for infinity: an overflow must survive a script's clamp of its gradients."""
    if inverse is None:
        return gradient
    result = gradient * (inverse if inverse.device == gradient.device else inverse.to(gradient.device))
    return result.add_(gradient, alpha=0) if result.layout is torch.strided else result


_BACKWARD = ("backward", "manual_backward")


def running_loss_name() -> str:
    """Return the script's name for the loss whose backward pass begins now; empty text if it has none."""
    line, by_library = own_line(sys._getframe(1))
    return loss_name(line, by_library=by_library)


def loss_name(line: str, *, by_library: bool) -> str:
    """Return the name of the loss whose backward pass a line calls: of the variable, attribute or key that holds it, or of a sum of such.

    Args:
        line: the line, as ``file:line``.
        by_library: whether the line calls a library, which runs the backward pass of its argument: ``accelerator.backward(loss)``.

    Returns:
        The name; empty text if the loss has none, or if the line has no such call or several.
    """
    file, _, number = line.rpartition(":")
    calls = [call for call in _calls_in(file) if call.lineno <= int(number or 0) <= (call.end_lineno or call.lineno)]
    if len(calls) != 1:
        return ""
    (call,) = calls
    assert isinstance(call.func, ast.Attribute)
    in_argument = by_library or call.func.attr != "backward" or ast.unparse(call.func.value) == "torch.autograd"
    if not in_argument:
        return _name(call.func.value)
    return _name(call.args[0]) if call.args else ""


@functools.lru_cache(maxsize=64)
def _calls_in(file: str) -> tuple[ast.Call, ...]:
    """Return the calls of backward passes in a file; none if it cannot be read, as code that was typed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python itself has warned about the script's text
            tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return tuple(call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in _BACKWARD)


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            names = [_name(left), _name(right)]
            return " + ".join(names) if all(names) else ""
        case ast.BinOp(left=left, op=ast.Div()):  # divided for accumulation
            return _name(left)
        case ast.Call(func=ast.Attribute(attr="scale"), args=[scaled]):  # by a GradScaler
            return _name(scaled)
    return ""


# A gradient inside the graph is scaled while the backward pass runs. The arguments of a script's hook are divided by the scale, and
# its result is multiplied by it again; gradients that the script retains are divided once the pass is over.


class UnscaledViews:
    """Wrappers around a script's gradient hooks, and the tensors inside a graph that retain a ``.grad``."""

    def __init__(self, inverse: Callable[[], Tensor | None], *, on_hook: Callable[[], None]) -> None:
        """Create the views.

        Args:
            inverse: returns the factor that unscales at present; None if nothing is scaled.
            on_hook: called when the script sets a hook on a gradient inside a graph, or retains one.
        """
        self._inverse, self._on_hook = inverse, on_hook
        self._retained = WeakTensorKeyDictionary()

    def install(self, patches: Patches) -> None:
        """Wrap hooks until ``patches`` are undone."""
        patches.around(Tensor, "register_hook", self._register_on_tensor)
        patches.around(Tensor, "retain_grad", self._retain_grad)
        for name in ("register_full_backward_hook", "register_full_backward_pre_hook"):
            patches.around(nn.Module, name, self._register_on_module)

    @property
    def any_retained(self) -> bool:
        """Whether a tensor inside a graph retains its gradient."""
        return bool(self._retained.data)  # a check in every step: .data saves a Python call

    @contextmanager
    def of_inner_gradients(self, inputs: Any) -> Iterator[None]:
        """Unscale the gradients that the backward pass inside leaves in tensors that are not leaves."""
        requested = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and not t.is_leaf]
        with warnings.catch_warnings():
            if requested:
                warnings.simplefilter("ignore")  # about reading the .grad of a tensor that does not retain it
            before = {id(t): (t, t.grad) for t in (*self._retained.keys(), *requested)}
        for tensor, _ in before.values():
            tensor.grad = None
        inverse = self._inverse()
        yield
        for tensor, earlier in before.values():
            added = tensor.grad if tensor.grad is None or inverse is None else tensor.grad * inverse
            tensor.grad = earlier if added is None else added if earlier is None else earlier + added

    def _register_on_tensor(self, original: Callable[..., Any], tensor: Tensor, hook: Callable[..., Any]) -> Any:
        # Under a function mode, torch's own function would call this replacement, by the name in its module.
        register = WITHOUT_MODE_CHECK.get(original, original)
        if tensor.is_leaf:
            return register(tensor, hook)
        self._on_hook()
        return register(tensor, self._with_unscaled(hook))

    def _register_on_module(
        self, original: Callable[..., Any], module: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return original(module, self._with_unscaled(hook), *args, **kwargs)

    def _with_unscaled(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any) -> Any:
            inverse = self._inverse()
            if inverse is None:
                return hook(*args)
            result = hook(*tree_map_only(Tensor, lambda g: g * inverse, args))
            return tree_map_only(Tensor, lambda g: g / inverse, result)

        return call

    def _retain_grad(self, original: Callable[..., Any], tensor: Tensor) -> None:
        original(tensor)
        if not tensor.is_leaf:
            self._on_hook()
            self._retained[tensor] = None
