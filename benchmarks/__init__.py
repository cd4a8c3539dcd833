"""Measurements behind the figures in the documentation; ``python -m benchmarks`` runs those that take minutes and need no GPU."""
