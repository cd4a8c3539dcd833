"""The ways in which scripts speak to CUDA's autocast, and the formats that torch's own CUDA dispatch gives in each.

A form is a piece of a script, with ``"cuda"`` in it as scripts write it. It notes the dtypes that it sees and what torch's queries answer.
As in ``cuda_dispatch``, the oracle runs it on tensors without data, in torch's CUDA build and without a GPU::

    python tests/oracles/cuda_forms.py          # writes cuda_forms.json

There the policy is what it stands for: CUDA's autocast in the policy's format around each model that is called outside any region,
with FP32 results, and the policy's format in each region of the script. Autograd has no thread for a device that is not there: a
backward function is called by itself, and a recomputation is expected to give what the first computation gave.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

DATA = Path(__file__).with_suffix(".json")
WIDTH = 4


class Script:
    """What a form needs of the script that it is a piece of; here as under Mezzo, on real tensors."""

    amp = False
    """A switch that is off where no GPU was found."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def tensor(self, *shape: int) -> Tensor:
        """Return an FP32 tensor on the script's device."""
        return torch.ones(*(shape or (2, WIDTH)))

    def module(self, module: nn.Module) -> nn.Module:
        """Return a module on the script's device."""
        return module

    def call(self, model: nn.Module, *args: Any) -> Any:
        """Call a model from outside any module."""
        return model(*args)

    def see(self, *values: Any) -> None:
        """Note the dtypes of tensors, and answers."""
        self.seen += [str(v.dtype if isinstance(v, Tensor) else v).removeprefix("torch.") for v in values]

    def state(self) -> None:
        """Note what torch's queries answer."""
        self.see(torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled())
        self.see(torch.get_autocast_dtype("cuda"), torch.get_autocast_gpu_dtype())

    def backward(self, loss: Tensor, *functions: Any) -> None:
        """Run the backward pass, in which the contexts of ``functions`` note what they see."""
        loss.backward()

    def in_thread(self, work: Callable[[], None]) -> None:
        """Run code in a thread of its own."""
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def compile(self, model: nn.Module) -> Any:
        """Compile a model."""
        return torch.compile(model, backend="aot_eager")

    def recomputed(self, first: int, end: int | None = None) -> None:
        """Expect what was seen from ``first`` on to be seen once more in the backward pass."""


class Net(nn.Module):
    """A layer, some code, and a layer."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.between = between

    def forward(self, x: Tensor) -> Any:
        """Run all three."""
        return self.b(self.between(self.a(x), self.w))


def net(s: Script, between: Callable[[Tensor, Tensor], Tensor] = lambda x, w: x @ w) -> Any:
    """Return a net on the script's device."""
    return s.module(Net(between))


def plain_model(s: Script) -> None:
    s.see(s.call(net(s), s.tensor()))


def opt_out_with(make: Callable[[], Any]) -> Callable[[Script], None]:
    def form(s: Script) -> None:
        def between(x: Tensor, w: Tensor) -> Tensor:
            s.see(x)
            with make():
                y = x.float() @ w
                s.state()
            s.see(y, x @ w)
            return y

        s.see(s.call(net(s, between), s.tensor()))

    return form


def opt_out_by_decorator(make: Callable[[], Any]) -> Callable[[Script], None]:
    def form(s: Script) -> None:
        @make()
        def between(x: Tensor, w: Tensor) -> Tensor:
            y = x.float() @ w
            s.see(y)
            return y

        s.see(s.call(net(s, between), s.tensor()))

    return form


def region_around(make: Callable[[], Any], *, with_model: bool = True) -> Callable[[Script], None]:
    def form(s: Script) -> None:
        w, x = s.tensor(WIDTH, WIDTH), s.tensor()
        model = net(s)
        with make():
            s.state()
            y = s.call(model, x) if with_model else x @ w
            s.see(y, y @ w, y.softmax(-1), (y - y.detach()).pow(2).mean())
        s.state()
        s.see(x @ w)

    return form


def region_on_decorator(s: Script) -> None:
    @torch.autocast("cuda", dtype=torch.float16)
    def step(x: Tensor, w: Tensor) -> None:
        s.see(x @ w, x.exp())

    step(s.tensor(), s.tensor(WIDTH, WIDTH))
    step(s.tensor(), s.tensor(WIDTH, WIDTH))


def one_object_twice(s: Script) -> None:
    region, model = torch.autocast("cuda"), net(s)
    for _ in range(2):
        with region:
            s.see(s.call(model, s.tensor()))
        s.state()


def on_off_on(s: Script) -> None:
    x, w = s.tensor(), s.tensor(WIDTH, WIDTH)
    with torch.autocast("cuda"):
        with torch.autocast("cuda", enabled=False):
            s.see(x @ w)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                s.see(x @ w)
                s.state()
            s.see(x @ w)
        s.see(x @ w)


def switch_around_model(s: Script) -> None:
    model, w = net(s), s.tensor(WIDTH, WIDTH)
    for _ in range(2):
        with torch.autocast("cuda", enabled=s.amp):
            y = s.call(model, s.tensor())
            s.see(y, y @ w, y.exp())
            s.state()
        s.see(s.tensor() @ w)


def switch_by_device(s: Script) -> None:
    model = net(s)
    with torch.autocast(device_type="cuda", dtype=torch.float16, enabled=s.amp):
        y = s.call(model, s.tensor())
        with torch.autocast("cuda", enabled=False):
            s.see(y.float() @ s.tensor(WIDTH, WIDTH))
    s.see(y)


def off_for_a_loss(s: Script) -> None:
    class Loss(nn.Module):
        def forward(self, y: Tensor, w: Tensor) -> Tensor:
            s.see(y @ w)
            return (y @ w).sum()

    model = net(s)
    with torch.autocast("cuda"):
        y = s.call(model, s.tensor())
    with torch.autocast("cuda", enabled=False):
        loss = Loss()(y.float(), s.tensor(WIDTH, WIDTH))
    s.see(y, loss)


def off_for_a_trained_head(s: Script) -> None:
    model, head = net(s), s.module(nn.Linear(WIDTH, WIDTH))
    with torch.autocast("cuda"):
        y = s.call(model, s.tensor())
    with torch.autocast("cuda", enabled=False):
        s.see(head(y.float()))


def custom_function(on_forward: Any, on_backward: Any, *, region: bool) -> Callable[[Script], None]:
    def form(s: Script) -> None:
        class Product(torch.autograd.Function):
            @staticmethod
            @on_forward
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
                ctx.save_for_backward(x, w)
                contexts.append(ctx)
                y = x @ w
                s.see(x, w, y)
                s.state()
                return y

            @staticmethod
            @on_backward
            def backward(ctx: Any, g: Tensor) -> Any:
                x, w = ctx.saved_tensors
                s.see(x @ w)
                s.state()
                # torch casts a gradient to what was given to the function
                return (g.float() @ w.float().t()).to(given[0].dtype), (x.float().t() @ g.float()).to(given[1].dtype)

        contexts: list[Any] = []
        given: list[Tensor] = []

        def between(x: Tensor, w: Tensor) -> Tensor:
            given[:] = x, w
            y: Tensor = Product.apply(x, w)
            s.see(y)
            return y

        if region:
            w = s.tensor(WIDTH, WIDTH).requires_grad_()
            with torch.autocast("cuda"):
                y = between(s.tensor().requires_grad_(), w)
        else:
            y = s.call(net(s, between), s.tensor())
        s.backward(y.float().sum(), (Product, contexts))

    return form


def checkpointed(*, reentrant: bool, in_module: bool, opts_out: bool) -> Callable[[Script], None]:
    def form(s: Script) -> None:
        def inner(x: Tensor, w: Tensor) -> Tensor:
            y = x @ w
            s.see(y)
            if opts_out:
                with torch.autocast("cuda", enabled=False):
                    y = y.float() @ w
                s.see(y)
            return y

        def between(x: Tensor, w: Tensor) -> Tensor:
            first = len(s.seen)
            with set_checkpoint_early_stop(False):  # the recomputation runs to its end
                y: Tensor = checkpoint(inner, x, w, use_reentrant=reentrant)
            s.recomputed(first)
            return y

        if in_module:
            y = s.call(net(s, between), s.tensor())
        else:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = between(s.tensor().requires_grad_(), s.tensor(WIDTH, WIDTH).requires_grad_())
        s.backward(y.float().sum())

    return form


def checkpointed_in_parts(s: Script) -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x @ x.t() @ x
            s.see(y, y.exp())
            return y

    with torch.autocast("cuda"), set_checkpoint_early_stop(False):
        first = len(s.seen)
        y = checkpoint_sequential([Part(), Part()], 2, s.tensor().requires_grad_(), use_reentrant=False)
        s.recomputed(first, first + 2)  # torch does not checkpoint the last part
    s.backward(y.float().sum())


def compiled(s: Script) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Any:
            y = self.a(x)
            with torch.autocast("cuda", enabled=False):
                off = y.float() @ self.w
            with torch.autocast("cuda", dtype=torch.bfloat16):
                on = off @ self.w
            return y, off, on, off @ self.w

    model = s.compile(s.module(Model()))
    with torch.autocast("cuda"):
        s.see(*s.call(model, s.tensor()))
    s.see(*s.call(model, s.tensor()))


def in_a_thread(s: Script) -> None:
    def work() -> None:
        with torch.autocast("cuda"):
            s.see(s.tensor() @ s.tensor(WIDTH, WIDTH))
            s.see(torch.is_autocast_enabled("cuda"))
        s.see(torch.is_autocast_enabled("cuda"))

    s.in_thread(work)


def without_gradients(s: Script) -> None:
    model = net(s)
    with torch.no_grad(), torch.autocast("cuda"):
        s.see(s.call(model, s.tensor()))
    with torch.autocast("cuda"):
        s.see(s.call(model, s.tensor()))


def result_outside_a_region(s: Script) -> None:
    model = net(s)
    with torch.autocast("cuda"):
        y = s.call(model, s.tensor())
    s.see(y, y.sum(), s.call(model, s.tensor()))


def dictionary_in_a_region(s: Script) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return {"logits": self.a(x), "all": (x, self.a(x))}

    model = s.module(Model())
    with torch.autocast("cuda"):
        found = s.call(model, s.tensor())
    s.see(found["logits"], *found["all"])


def asked_for_the_dtype(s: Script) -> None:
    def between(x: Tensor, w: Tensor) -> Tensor:
        if torch.is_autocast_enabled():
            x = x.to(torch.get_autocast_gpu_dtype())
        s.see(x, torch.is_autocast_enabled("cuda"))
        return x @ w

    s.see(s.call(net(s, between), s.tensor()))


def _old(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.cuda.amp.autocast(*args, **kwargs)


def _old_forward(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.cuda.amp.custom_fwd(*args, **kwargs)


def _old_backward(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.cuda.amp.custom_bwd(function)


_NEW_BACKWARD = torch.amp.custom_bwd(device_type="cuda")
FORMS: dict[str, Callable[[Script], None]] = {
    "model": plain_model,
    "opt out": opt_out_with(lambda: torch.autocast("cuda", enabled=False)),
    "opt out, torch.amp": opt_out_with(lambda: torch.amp.autocast("cuda", enabled=False)),
    "opt out, old": opt_out_with(lambda: _old(enabled=False)),
    "opt out, old, by position": opt_out_with(lambda: _old(False)),
    "opt out, named": opt_out_with(lambda: torch.autocast(device_type="cuda", enabled=False)),
    "opt out, with a dtype": opt_out_with(lambda: torch.autocast("cuda", dtype=torch.float16, enabled=False)),
    "inner region": opt_out_with(lambda: torch.autocast("cuda")),
    "inner region, FP16": opt_out_with(lambda: torch.autocast("cuda", dtype=torch.float16)),
    "inner region, BF16": opt_out_with(lambda: torch.autocast("cuda", dtype=torch.bfloat16)),
    "decorator, off": opt_out_by_decorator(lambda: torch.autocast("cuda", enabled=False)),
    "decorator, off, old": opt_out_by_decorator(lambda: _old(enabled=False)),
    "decorator, on": opt_out_by_decorator(lambda: torch.autocast("cuda")),
    "region": region_around(lambda: torch.autocast("cuda")),
    "region, FP16": region_around(lambda: torch.amp.autocast("cuda", dtype=torch.float16)),
    "region, BF16": region_around(lambda: torch.autocast(device_type="cuda", dtype=torch.bfloat16)),
    "region, old": region_around(_old),
    "region, old, FP16": region_around(lambda: _old(dtype=torch.float16)),
    "region around tensors": region_around(lambda: torch.autocast("cuda"), with_model=False),
    "region around tensors, old": region_around(_old, with_model=False),
    "region by a decorator": region_on_decorator,
    "one object, twice": one_object_twice,
    "on, off, on": on_off_on,
    "own switch": switch_around_model,
    "own switch, with an opt-out": switch_by_device,
    "off for a loss": off_for_a_loss,
    "off for a head": off_for_a_trained_head,
    "custom_fwd": custom_function(torch.amp.custom_fwd(device_type="cuda"), _NEW_BACKWARD, region=False),
    "custom_fwd, region": custom_function(torch.amp.custom_fwd(device_type="cuda"), _NEW_BACKWARD, region=True),
    "custom_fwd, cast": custom_function(
        torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32), _NEW_BACKWARD, region=False
    ),
    "custom_fwd, cast, region": custom_function(
        torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32), _NEW_BACKWARD, region=True
    ),
    "custom_fwd, old": custom_function(_old_forward, _old_backward, region=False),
    "custom_fwd, old, cast": custom_function(_old_forward(cast_inputs=torch.float32), _old_backward, region=False),
    "custom_fwd, old, cast, region": custom_function(
        _old_forward(cast_inputs=torch.float32), _old_backward, region=True
    ),
    "checkpoint": checkpointed(reentrant=False, in_module=True, opts_out=False),
    "checkpoint, reentrant": checkpointed(reentrant=True, in_module=True, opts_out=False),
    "checkpoint, opt out": checkpointed(reentrant=False, in_module=True, opts_out=True),
    "checkpoint, reentrant, opt out": checkpointed(reentrant=True, in_module=True, opts_out=True),
    "checkpoint, region": checkpointed(reentrant=False, in_module=False, opts_out=True),
    "checkpoint, reentrant, region": checkpointed(reentrant=True, in_module=False, opts_out=True),
    "checkpoint_sequential": checkpointed_in_parts,
    "compiled": compiled,
    "thread": in_a_thread,
    "no_grad": without_gradients,
    "result outside a region": result_outside_a_region,
    "dictionary": dictionary_in_a_region,
    "asked for the dtype": asked_for_the_dtype,
}


class OnCuda(Script):
    """The script on CUDA, under torch's own autocast."""

    amp = True

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self._low = low
        self._again: list[str] = []

    def tensor(self, *shape: int) -> Tensor:
        """Return a tensor without data."""
        return torch.empty(*(shape or (2, WIDTH)), device="cuda")

    def module(self, module: nn.Module) -> nn.Module:
        """Return a module without data."""
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(torch.empty(weight.shape, device="cuda")))
        return module

    def call(self, model: nn.Module, *args: Any) -> Any:
        """Call a model as the policy does."""
        if torch.is_autocast_enabled("cuda"):
            return model(*args)
        with torch.autocast("cuda"):
            result = model(*args)
        return tree_map(torch.Tensor.float, result)

    def backward(self, loss: Tensor, *functions: Any) -> None:
        """Call the backward functions by themselves, and note recomputed values again."""
        self.seen += self._again
        for function, contexts in functions:
            for ctx in contexts:
                function.backward(ctx, self.tensor())

    def in_thread(self, work: Callable[[], None]) -> None:
        """Run the code here: the mode of tensors without data is this thread's, and no region is open around it."""
        work()

    def compile(self, model: nn.Module) -> Any:
        """Return the model: compiled code has the formats of eager code."""
        return model

    def recomputed(self, first: int, end: int | None = None) -> None:
        """Note what is to be seen again."""
        self._again = self.seen[first:end]


@contextmanager
def _cuda_without_a_gpu(low: torch.dtype) -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._C._ensureCUDADeviceGuardSet()
    autocast = torch.amp.autocast_mode.autocast
    original = autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **named: Any) -> None:
        original(self, device_type, low if enabled else dtype, enabled, **named)

    with (
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        patch.object(torch.cuda, "_lazy_init", return_value=None),
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
        patch.object(autocast, "__init__", init),
        FakeTensorMode(),
    ):
        yield


def on_cuda(form: Callable[[Script], None], low: torch.dtype) -> list[str]:
    """Return what a form sees on CUDA."""
    script = OnCuda(low)
    with _cuda_without_a_gpu(low):
        form(script)
    return script.seen


def _write() -> None:
    assert torch.version.cuda is not None, "this needs torch's CUDA build"
    found = {
        str(low).removeprefix("torch."): {name: on_cuda(form, low) for name, form in FORMS.items()}
        for low in (torch.float16, torch.bfloat16)
    }
    DATA.write_text(json.dumps({"torch": torch.__version__.split("+")[0], **found}, indent=0) + "\n")
    print(len(FORMS), "forms")


if __name__ == "__main__":
    _write()
