"""What a patch writes: torch.amp, a session, or the argument of a library; and the parts that they share."""
