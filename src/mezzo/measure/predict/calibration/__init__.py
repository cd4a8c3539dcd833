"""Rates of this machine, measured."""
