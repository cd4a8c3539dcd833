"""Measure steps, memory and formats of a run, and compare runs."""
