"""Record the tape of an unmodified script, in a process of its own."""
