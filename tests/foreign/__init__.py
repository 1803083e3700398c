"""Checkpoints of other frameworks, read as tables of byte runs."""
