"""Commands that run a script several times: each run asks for what the last one could not tell."""
