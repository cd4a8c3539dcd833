"""``mezzo ranges`` of a Paddle script."""
