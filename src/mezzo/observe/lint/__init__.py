"""Lint of a script's own mixed precision: its autocast, its GradScaler, and what stands around them."""
