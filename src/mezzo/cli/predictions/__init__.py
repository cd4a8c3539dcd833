"""Predictions that commands show: assumptions, prices, batches that would fit, configurations that are ruled out."""
