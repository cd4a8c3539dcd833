"""Run a user's training script in a child process, under a policy."""
