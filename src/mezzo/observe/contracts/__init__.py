"""Precision contracts: which formats a training is expected to keep its tensors in, and which it has."""
