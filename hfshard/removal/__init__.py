"""Removal of checkpoints from a directory, a run or a store: what goes, in which order, and what stays."""
