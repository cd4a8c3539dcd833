"""Fingerprints of every value of chosen steps, so that two runs can be compared without keeping their tensors."""
