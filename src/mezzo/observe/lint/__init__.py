"""Lint of a script's own mixed precision: its autocast, its GradScaler and the code around them."""
