"""All records below a folder: one page of them, read-only over HTTP if asked."""
