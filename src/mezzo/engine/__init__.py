"""The engine: what makes a training step run in a policy's formats, correctly."""
