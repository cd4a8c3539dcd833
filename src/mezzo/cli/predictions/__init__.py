"""Predictions that commands show: assumptions, prices, what would fit, what is ruled out."""
