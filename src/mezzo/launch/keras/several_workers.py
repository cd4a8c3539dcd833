"""Refuse the strategies of TensorFlow that train in several processes: each command would record its own process, into one folder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mezzo.errors import ScriptError
from mezzo.launch.patches import Patches

_IN_PROCESSES = ("MultiWorkerMirroredStrategy", "ParameterServerStrategy")


def refuse_several_workers(patches: Patches) -> None:
    """Refuse clusters of more than one process until ``patches`` are undone; call it after TensorFlow's import."""
    import tensorflow as tf

    for name in _IN_PROCESSES:
        patches.around(getattr(tf.distribute, name), "__init__", functools.partial(_alone, name))


def _alone(
    name: str, original: Callable[..., None], self: Any, cluster_resolver: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Make a strategy whose cluster, by default that of TF_CONFIG, is one process."""
    import tensorflow as tf

    resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    size = sum(cluster.num_tasks(job) for job in cluster.jobs)
    if size > 1:
        raise ScriptError(
            f"{name} trains in {size} processes, each with a mezzo command of its own; allowed: strategies of one process",
            hint="use tf.distribute.MirroredStrategy, or unset TF_CONFIG to train in one process",
        )
    original(self, cluster_resolver, *args, **kwargs)
