"""Views of records: the terminal and one self-contained HTML file."""
