"""A script's updates: by optimizers, by hand, left out by the script itself."""
