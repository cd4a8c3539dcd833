"""``mezzo diagnose`` of a Paddle script: what one run records."""
