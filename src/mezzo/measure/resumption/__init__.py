"""Whether a stopped training continued as if it had not been stopped, from traces of its state. Imports no torch."""
