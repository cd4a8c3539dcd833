"""Limits that several kinds of observation share. Imports no torch."""

MOST_LISTED = 12
"""Modules or lines that a finding lists."""
HEADROOM = 2
"""Doublings that a suggested loss scale stays below the largest one that fits: gradients vary by about that between batches."""
ROUNDOFFS = 40
"""Unit roundoffs that a gradient may be off by: what a hundred healthy layers in a row stay below."""
