"""The processes of a run: how they are started, forked from a preloaded server, signalled and killed."""
