"""Commands that run a script several times, each time to learn what the runs so far could not show."""
