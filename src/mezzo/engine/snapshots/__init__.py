"""Snapshots: the whole state of a training run, so that it can resume as if it had never stopped; files are whole or absent."""
