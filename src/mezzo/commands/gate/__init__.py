"""``mezzo gate``: whether a script still trains as its golden file says."""
