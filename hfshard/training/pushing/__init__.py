"""Checkpoints of a run on hubs: pushed, in the background too, and fetched."""
