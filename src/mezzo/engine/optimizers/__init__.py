"""Optimizers in one pass, master weights, and the hooks around an optimizer's step."""
