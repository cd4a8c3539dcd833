"""Measurements behind the figures in the documentation: ``python -m benchmarks`` runs all that a CPU can."""
