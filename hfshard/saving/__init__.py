"""Saving, copying and resharding of checkpoints."""
