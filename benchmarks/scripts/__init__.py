"""Whole scripts under every command."""
