"""What a patch writes: torch.amp, a session, or a library's argument; and the parts that these share."""
