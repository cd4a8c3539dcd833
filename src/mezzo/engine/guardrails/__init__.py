"""Guardrails: detect from its numbers that a training run is going wrong, and return it to a good snapshot."""
