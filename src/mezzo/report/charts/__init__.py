"""The charts of a page: what each shows, as plain data, and how data becomes SVG."""
