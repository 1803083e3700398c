"""Checkpoints of format 1, byte for byte: they load for ever, and are what we still write."""
