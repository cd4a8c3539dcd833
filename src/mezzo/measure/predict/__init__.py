"""Time and memory of a training step on a GPU that is not here, from one trace on this machine."""
