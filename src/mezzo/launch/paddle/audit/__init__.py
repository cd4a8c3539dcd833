"""``mezzo audit`` for a Paddle script."""
