"""``mezzo run``: a script under a policy."""
