"""Guardrails: detect from a training's numbers that it goes wrong, and return it to a good snapshot."""
