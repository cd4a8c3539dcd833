"""``mezzo audit`` of a Paddle script."""
