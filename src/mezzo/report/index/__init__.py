"""An index page of all records below a folder, which can also be served read-only over HTTP."""
