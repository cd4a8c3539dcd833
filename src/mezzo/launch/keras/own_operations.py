"""Operations of Mezzo's own in a TensorFlow script, which the script's op callbacks do not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tensorflow.python.eager import context


@contextmanager
def own_operations() -> Iterator[None]:
    """Keep op callbacks away from the operations inside: ``tf.debugging.enable_check_numerics`` would end the script at a NaN of Mezzo's.

    Mezzo writes NaN for a value that a step does not have, such as a loss scale.
    """
    state = context.context()
    callbacks = list(state.op_callbacks)
    for callback in callbacks:
        state.remove_op_callback(callback)
    try:
        yield
    finally:
        for callback in callbacks:
            state.add_op_callback(callback)
