"""Whether a stopped training went on as if it had not been stopped, from traces of its state. Imports no torch."""
