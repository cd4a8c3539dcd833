"""Snapshots: everything that a training needs to go on as if it had never stopped, in files that are whole or not there."""
