"""``mezzo diagnose`` for a Paddle script: what one run records."""
