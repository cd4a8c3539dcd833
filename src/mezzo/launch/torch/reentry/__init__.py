"""Snapshots of unmodified scripts: a script that is started again runs its set-up, and enters its loops where it was stopped."""
