"""Options that several commands share, with their checks and meaning."""
