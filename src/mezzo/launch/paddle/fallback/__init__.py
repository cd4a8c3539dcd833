"""``mezzo fallback`` of a Paddle script: what one run measures."""
