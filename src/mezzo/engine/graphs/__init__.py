"""A whole training step as CUDA graphs."""
