"""Are the numbers right."""
