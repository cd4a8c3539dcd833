"""Casts: which operation runs in which format, in a region, in a module, in compiled code."""
