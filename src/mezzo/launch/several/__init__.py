"""Commands that run a script several times, each time to learn what the earlier runs could not show."""
