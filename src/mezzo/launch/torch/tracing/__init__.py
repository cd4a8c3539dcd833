"""The state of a script's training before each update, as digests: what ``mezzo resume-check`` compares."""
