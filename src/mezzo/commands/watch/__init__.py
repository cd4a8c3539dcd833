"""``mezzo watch``: what holds a script back, while it runs and at the end."""
