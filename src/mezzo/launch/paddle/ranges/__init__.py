"""``mezzo ranges`` for a Paddle script."""
