"""Limits that several kinds of observation share. Imports no torch."""

MOST_LISTED = 12
"""Most modules or lines that a finding lists."""
HEADROOM = 2
"""Doublings between a suggested loss scale and the largest one that fits: gradients vary by about that much between batches."""
ROUNDOFFS = 40
"""Tolerated error of a gradient, in unit roundoffs: a hundred healthy layers in a row stay below it."""
