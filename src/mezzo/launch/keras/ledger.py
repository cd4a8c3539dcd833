"""Variables into which a TensorFlow graph writes its steps, one row per step; Python reads them when the graph returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from mezzo.launch.keras.own_operations import own_operations
from mezzo.launch.keras.state import KerasRun

_CAPACITY = 65_536
"""Most steps that one call of a traced function may make before rows are overwritten."""
_NUM_COLUMNS = 6  # loss, norm, scale, skipped, batch size, optimizer


class Ledger:
    """A log of steps, written by operations that run in graphs as well as eagerly."""

    def __init__(self, run: KerasRun) -> None:
        self._run = run
        self._created = False
        self._collected = 0
        self.last_batch: int | None = None
        """The batch size of the step read last."""

    @own_operations()
    def loss(self, losses: Sequence[Any]) -> None:
        """Add losses to the open step."""
        self._create_variables()
        self._loss.assign_add(tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]))
        self._num_losses.assign_add(1)

    @own_operations()
    def reduced(self, norm: Any) -> None:
        """Keep the norm of the gradients that an update of several replicas uses."""
        self._create_variables()
        self._reduced.assign(norm)

    @own_operations()
    def norm_of_reduced(self, norm: Any) -> Any:
        """Return the norm that was kept since the last call; a first replica's ``norm`` with infinity if the update was skipped."""
        self._create_variables()
        kept = tf.identity(self._reduced)
        self._reduced.assign(math.nan)
        return tf.where(
            tf.math.is_nan(kept) & tf.math.is_finite(norm), math.inf, tf.where(tf.math.is_nan(kept), norm, kept)
        )

    @own_operations()
    def update(
        self, *, norm: Any, scale: Any, before: Any, after: Any, accumulates: int, batch: Any, owner: int
    ) -> None:
        """Write a step, unless its gradients are still accumulating, or no backward pass ran since the last step."""
        self._create_variables()
        skipped = tf.equal(before, after)
        is_update = skipped | tf.equal(after % tf.cast(accumulates, after.dtype), 0)
        if self._run.has_backward:
            is_update = is_update & (self._num_losses > 0)
        loss = tf.where(self._num_losses > 0, self._loss / accumulates, math.nan)
        values = [loss, norm, math.nan if scale is None else scale, skipped, batch, owner]
        row = tf.stack([tf.cast(value, tf.float32) for value in values])
        index = tf.cast(self._num_rows % _CAPACITY, tf.int32)
        self._rows.scatter_nd_update([[index]], [row])  # overwrites the row until the step is complete
        self._num_rows.assign_add(tf.cast(is_update, tf.int64))
        self._loss.assign(tf.where(is_update, 0.0, self._loss))
        self._num_losses.assign(tf.where(is_update, 0, self._num_losses))

    @own_operations()
    def collect(self) -> None:
        """Close the steps written since the last call."""
        num = 0 if not self._created else int(self._num_rows.numpy()) - self._collected
        if not num:
            return
        lost = max(num - _CAPACITY, 0)
        indices = [k % _CAPACITY for k in range(self._collected + lost, self._collected + num)]
        self._collected += num
        rows = [[math.nan] * _NUM_COLUMNS] * lost + tf.gather(self._rows, indices).numpy().tolist()
        losses, norms, scales, skips, batches, owners = zip(*rows, strict=True)
        last = int(batches[-1]) if math.isfinite(batches[-1]) else -1
        self.last_batch = last if last > 0 else None
        if num > 1:
            why = "one call of a traced function makes several steps; each is given an even share of its time"
            self._run.note_left_alone("time a step", "not known of each", why)
        known_owners = [int(owner) if math.isfinite(owner) else 0 for owner in owners]
        self._run.close(losses=losses, norms=norms, scales=scales, skips=[s == 1.0 for s in skips], owners=known_owners)

    def _create_variables(self) -> None:
        if self._created:
            return
        self._created = True
        # The plain class: in the scope of a distribution strategy, tf.Variable creates one variable per replica.
        variable = resource_variable_ops.ResourceVariable
        with tf.init_scope():
            self._loss = variable(0.0, trainable=False)
            self._reduced = variable(math.nan, trainable=False)
            self._num_losses = variable(0, trainable=False)
            self._num_rows = variable(0, trainable=False, dtype=tf.int64)
            self._rows = variable(tf.zeros([_CAPACITY, _NUM_COLUMNS]), trainable=False)
