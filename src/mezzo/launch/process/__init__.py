"""Processes of a run: started together, stopped together, forked from a preloaded server."""
