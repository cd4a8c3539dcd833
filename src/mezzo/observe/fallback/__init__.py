"""Find the modules that need FP32: compare gradients between precisions, search a small set, verify it."""
