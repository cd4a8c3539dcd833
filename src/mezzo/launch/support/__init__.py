"""Which commands and options take a script of which framework."""
