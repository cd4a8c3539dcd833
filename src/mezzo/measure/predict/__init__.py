"""Time and memory of a training step on a GPU that this machine does not have, from one trace on this machine."""
