"""Where the processes of a run differ, although they should not. Pure functions; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mezzo.records import RankRun, Reason

_SLOWER, _LARGER = 1.5, 1.25
"""Least ratio between the ranks' CPU times per step, and between their memory, that is worth a line."""
_FEW_STEPS = 10
_SHOWN = 5


def differences(ranks: Sequence[RankRun]) -> list[Reason]:
    """Return where the ranks of a run differ, the most serious difference first."""
    return [*_weights(ranks), *_steps(ranks), *_skips(ranks), *_scales(ranks), *_times(ranks), *_memory(ranks)]


def _weights(ranks: Sequence[RankRun]) -> Iterator[Reason]:
    if len({rank.weights for rank in ranks}) > 1 and all(rank.weights for rank in ranks):
        value = _by_value({rank.rank: rank.weights for rank in ranks})
        why = "nothing kept them equal: wrap the model in DistributedDataParallel or fully_shard, unless each rank is to have its own model"
        yield Reason(what="weights", value=value, reason=why)


def _steps(ranks: Sequence[RankRun]) -> Iterator[Reason]:
    counts = {rank.rank: rank.num_steps for rank in ranks}
    if len(set(counts.values())) > 1:
        few, many = min(counts, key=lambda r: counts[r]), max(counts, key=lambda r: counts[r])
        value = f"{counts[few]} on rank {few}, {counts[many]} on rank {many}"
        yield Reason(what="steps", value=value, reason="the ranks did not make the same number of updates")


def _skips(ranks: Sequence[RankRun]) -> Iterator[Reason]:
    sets = {rank.rank: set(rank.skipped_steps) for rank in ranks}
    everywhere, anywhere = set.intersection(*sets.values()), set.union(*sets.values())
    for step in sorted(anywhere - everywhere)[:_SHOWN]:
        skipped = [rank for rank, steps in sets.items() if step in steps]
        value = f"step {step}, by rank {', '.join(map(str, skipped))} only"
        why = "the other ranks made that update: their weights are no longer the same"
        yield Reason(what="skipped", value=value, reason=why)


def _scales(ranks: Sequence[RankRun]) -> Iterator[Reason]:
    scales = {rank.rank: f"{rank.final_scale:g}" for rank in ranks if rank.final_scale is not None}
    if len(set(scales.values())) > 1:
        yield Reason(what="loss scale", value=_by_value(scales), reason="the ranks saw different overflows")


def _times(ranks: Sequence[RankRun]) -> Iterator[Reason]:
    """Compare CPU times: wall times are the same in all ranks, which wait for the slowest one."""
    times = {r.rank: r.cpu_ms for r in ranks if r.cpu_ms and r.device == "cpu" and r.num_steps >= _FEW_STEPS}
    if len(times) < 2:
        return
    slow, fast = max(times, key=lambda r: times[r]), min(times, key=lambda r: times[r])
    if times[slow] > _SLOWER * times[fast]:
        value = f"rank {slow} computes {times[slow] / times[fast]:.1f} times as long as rank {fast}"
        why = "the others wait for it in every step: give it less data, or the same kind of device"
        yield Reason(what="time a step", value=value, reason=why)


def _memory(ranks: Sequence[RankRun]) -> Iterator[Reason]:
    sizes = {r.rank: size for r in ranks if (size := r.cuda_allocated_bytes or r.total_bytes)}
    if len(sizes) < 2:
        return
    large, small = max(sizes, key=lambda r: sizes[r]), min(sizes, key=lambda r: sizes[r])
    if sizes[large] > _LARGER * sizes[small]:
        value = f"rank {large} has {sizes[large] / sizes[small]:.2f} times the bytes of rank {small}"
        yield Reason(what="memory", value=value, reason="the largest rank limits the batch")


def _by_value(values: dict[int, str]) -> str:
    """Return which ranks have which value: ``1024 on rank 0; 512 on ranks 1, 2``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items()
    )
