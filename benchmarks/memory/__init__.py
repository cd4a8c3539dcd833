"""How many bytes."""
