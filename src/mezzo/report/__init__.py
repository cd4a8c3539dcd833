"""Views of records: the terminal, a self-contained HTML page and TensorBoard."""
