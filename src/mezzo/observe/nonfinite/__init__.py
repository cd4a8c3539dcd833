"""Find the first value that left its format, what it did to the step, and what to write against it."""
