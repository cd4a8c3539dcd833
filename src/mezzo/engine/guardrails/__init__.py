"""Guardrails: notice in the numbers of a training that it is going wrong, and take it back to where it was well."""
