"""Several processes that a launcher started, as ``torchrun`` does: each runs the script, and rank 0 leads them."""
