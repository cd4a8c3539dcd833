"""Each kind of record as display strings: all words of a view, built once for the terminal and the page."""
