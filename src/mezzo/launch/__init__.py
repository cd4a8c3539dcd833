"""Run somebody's training script in a child process, under a policy."""
