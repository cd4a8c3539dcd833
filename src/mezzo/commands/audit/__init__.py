"""``mezzo audit``: which operation ran in which format, and what is worth changing."""
