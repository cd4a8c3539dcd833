"""The error of what a snapshot cannot hold."""

from __future__ import annotations

from mezzo.errors import SnapshotError


class NotSavable(SnapshotError):
    """Something that the loop can reach cannot be saved, or the loop cannot be entered again."""

    lasting = False
    """Whether it will be so in the loops around as well."""
