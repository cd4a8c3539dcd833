"""A script's backward passes, scaled, and unscaled again before the script sees a gradient."""
