"""Constants of the time formulas, fitted on public measurements, with the residuals of the fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Shares reached and sizes; each has one physical meaning."""

    half: float = 0.75
    tf32: float = 0.75
    fp32: float = 0.75
    depthwise: float = 0.2
    grouped: float = 0.5
    bandwidth: float = 0.75
    layout_copies: float = 0.5
    norm_passes: float = 1.0
    l2_share: float = 0.2
    overlap: float = 2.0
    depth_latency: float = 32.0
    latency_s: float = 3e-6
    launch_s: float = 6e-6
    feed_bytes: float = 40.0
    winograd: float = 2.0
    block_bytes: float = 5.0
    old_libraries: float = 1.15
