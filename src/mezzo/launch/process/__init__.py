"""Processes of a run: started together, stopped together, forked from one that is ready."""
