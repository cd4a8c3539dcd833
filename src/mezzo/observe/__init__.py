"""Observe what a training script computes and return records; change nothing."""
