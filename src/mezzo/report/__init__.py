"""Views of records: the terminal, a self-contained HTML page, an index of pages, and experiment trackers."""
