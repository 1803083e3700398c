"""Checkpoint viewers: the contents of one, and the differences between two."""
