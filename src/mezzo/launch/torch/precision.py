"""The precision of a script: the policy as it was requested, as it is at present and as it is applied, with its loss scales and casts."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo import oplists
from mezzo.engine.casts import conversion
from mezzo.engine.casts.casting import Casting
from mezzo.engine.matrix_units import low_layers
from mezzo.engine.scaling import NoScale, Scale, scale_for
from mezzo.engine.session_guard import policy_note
from mezzo.errors import PolicyError, UnsupportedFormatError
from mezzo.launch.torch.notes import RunNotes
from mezzo.policy import Policy
from mezzo.policyfields import split_product
from mezzo.records import Note

_FP32_UNDER_MASTERS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "loss", "binary_cross_entropy"}


def for_scripts(policy: Policy) -> Policy:
    """Return the policy as applied to a script, which keeps its own parameters.

    With master weights, a script's clipping and logging need FP32 gradients on its parameters, which 16-bit parameters cannot have.
    So the script's FP32 parameters are the masters, and everything but norms and losses is listed to run in 16 bits.
    """
    if not policy.master_weights:
        return policy
    named = {*policy.fp32, *policy.widest, *policy.lower, *_FP32_UNDER_MASTERS}
    lower = (*policy.lower, *(f.name for f in oplists.FAMILIES if f.name not in named))
    try:
        return policy.replace(casting="ops", master_weights=False, lower=lower)
    except PolicyError as error:  # a single operation of a family was named
        raise PolicyError(error.message, hint="under a -master policy, name whole families") from None


class ScriptPrecision:
    """A script's policy, its loss scales and its casts; everything is None or off if the script keeps its own precision."""

    def __init__(self, policy: Policy | None, notes: RunNotes) -> None:
        self._notes = notes
        self.requested = policy
        self.present = policy
        """The policy, or the policy that the run has fallen back to."""
        self.effective = None if policy is None else for_scripts(policy)
        """The present policy as it is applied to a script."""
        self.at_start: tuple[Policy | None, bool] | None = None
        """Before the first fallback, the effective policy and whether it was emulated; None if there was none."""
        self.change: Note | None = None
        """The policy since the last fallback, and why."""
        self.device_type: str | None = None
        self.scale: Scale = NoScale()
        self.inner_scale: Scale = NoScale()
        """The scale of gradients that the script computes with, as in a penalty."""
        self._castings: dict[tuple[str, int], Casting] = {}
        self._unmatched = set(() if policy is None else (*policy.fp32_modules, *policy.bf16_products))
        self._cast_by_us = WeakTensorKeyDictionary()

    def begin_on(self, device: torch.device) -> None:
        """Train on this device from now on."""
        self.device_type = device.type
        self.renew_scales(device)

    def renew_scales(self, device: torch.device) -> None:
        """Begin with new loss scales."""
        if self.effective is not None:
            self.scale = scale_for(self.effective, device, known=True)
            self.inner_scale = scale_for(self.effective, device, known=True)

    def restart_scale(self, device: torch.device | None) -> None:
        """Begin with a new loss scale: the steps so far did not belong to the training; ``device`` is None if it is not known."""
        if self.effective is not None and device is not None:
            self.scale = scale_for(self.effective, device, known=True)

    def change_to(
        self, policy: Policy, value: str, why: str, *, device: torch.device, roots: Iterable[nn.Module]
    ) -> None:
        """Continue under ``policy``; what earlier modules are cast to is found again when it is needed."""
        self.at_start = self.at_start or (self.effective, self.emulates)
        self.present, self.effective = policy, for_scripts(policy)
        self.change = policy_note(value, why)
        self._castings.clear()
        for module in roots:
            self._leave_sparse_embeddings(module)
        self.renew_scales(device)

    def casting(self, device_type: str) -> Casting | None:
        """Return the policy's casting on a device in this thread, or None if it casts nothing."""
        # A casting caches casts of weights while a region is open: one thread's region must not keep stale ones for another.
        key = (device_type, threading.get_ident())
        casting = self._castings.get(key)
        if casting is None and self.effective is not None and self.effective.lowers:
            casting = self._castings[key] = Casting.of(self.effective, device_type)
        return casting

    @property
    def main_casting(self) -> Casting | None:
        """The casting on the device that the script trains on."""
        return None if self.device_type is None else self.casting(self.device_type)

    @property
    def emulates(self) -> bool:
        """Whether the policy's formats are emulated; False if the device does not support the policy at all."""
        try:
            casting = self.main_casting
        except UnsupportedFormatError:  # the error with which the script's first region ended
            return False
        return casting is not None and casting.emulates

    def prepare(self, module: nn.Module, device: torch.device) -> None:
        """Cast a model that is called for the first time, or keep parts of it in FP32, as the policy says."""
        if self.effective is None:
            return
        self._note_dtypes(module, lowers=self.effective.lowers)
        if not self.effective.lowers:
            return
        self._leave_sparse_embeddings(module)
        policy, matched = self.effective, conversion.matching_patterns(module, self.effective.fp32_modules)
        self._unmatched -= matched
        if len(matched) < len(policy.fp32_modules):
            policy = policy.replace(fp32_modules=tuple(matched))
        products = low_layers.matching_products(module, policy.bf16_products)
        self._unmatched -= products
        if len(products) < len(policy.bf16_products):
            policy = policy.replace(bf16_products=tuple(products))
        casting = self.casting(device.type)
        _, left_alone = low_layers.convert([module], policy, emulated=casting is None or casting.emulates) or (0, [])
        for choice in left_alone:
            self._notes.note_left_alone(choice.what, choice.value, choice.reason)
        if policy.casting == "model":
            conversion.cast_model(module, policy, device.type)
            self._cast_by_us.update(dict.fromkeys(module.parameters()))
        else:
            conversion.keep_fp32(module, policy, device.type)
            if self.requested is not None and self.requested.master_weights:
                conversion.keep_own_norms(module, policy, device.type)

    def _note_dtypes(self, module: nn.Module, *, lowers: bool) -> None:
        own = [p for p in module.parameters() if p not in self._cast_by_us]
        dtypes = {p.dtype for p in own if p.is_floating_point()}
        name = type(module).__name__
        if lowers and any(p.is_complex() for p in own):
            self._notes.note_left_alone(
                "complex64", name, "its weights are complex, and complex numbers are never cast"
            )
        if lowers and torch.double in dtypes:
            self._notes.note_left_alone("float64", name, "its weights are float64, and float64 is never cast")
        if any(dtype.itemsize == 2 for dtype in dtypes):
            where = conversion.where_16_bits(module, leave_out=self._cast_by_us)
            self._notes.note_own_16_bits(where)

    def _leave_sparse_embeddings(self, module: nn.Module) -> None:
        sparse = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in module.modules())
        if self.effective is not None and sparse and "embedding" in self.effective.lower:
            self.effective = self.effective.replace(lower=tuple(f for f in self.effective.lower if f != "embedding"))
            self._castings.clear()
            why = "torch cannot cast a sparse gradient, so its weight is looked up in FP32"
            self._notes.note_left_alone("sparse embedding", type(module).__name__, why)

    def check_patterns(self, roots: Iterable[nn.Module]) -> None:
        """Raise if a pattern of the policy has matched no module by the time of the first update."""
        if self._unmatched:
            names = [n for root in roots for n in conversion.module_names(root)]
            first = sorted(self._unmatched)[0]
            product = self.effective is not None and first in self.effective.bf16_products
            raise conversion.no_such_module(split_product(first)[0] if product else first, names)
