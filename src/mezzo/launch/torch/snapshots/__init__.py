"""Snapshots of a script that knows nothing of them: ``mezzo run --snapshot`` and ``--resume``."""
