"""What does Mezzo cost in time."""
