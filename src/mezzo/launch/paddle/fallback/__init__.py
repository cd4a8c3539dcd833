"""``mezzo fallback`` for a Paddle script: what one run measures."""
