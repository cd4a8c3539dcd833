"""The commands, one file each: options, and the rule for the exit code."""
