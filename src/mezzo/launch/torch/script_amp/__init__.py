"""A script's own mixed precision: replaced, recorded, checked."""
