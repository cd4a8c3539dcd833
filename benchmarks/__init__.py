"""Measurements behind the figures in the documentation; ``python -m benchmarks`` runs those of a few minutes that need no GPU."""
