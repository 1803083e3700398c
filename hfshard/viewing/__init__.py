"""Checkpoints for people to look at: what is in one, and what differs between two."""
