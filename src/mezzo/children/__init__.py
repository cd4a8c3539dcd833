"""A script as a child process: what its text says before it runs, how it is started, forked, signalled and killed. Imports no framework."""
