"""``mezzo ranges``: overflow and underflow of a script's values at every loss scale, in every format."""
