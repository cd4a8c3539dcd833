"""Help and corrections: what they show, as data and as text."""
