"""Crash-safe replacement of a checkpoint."""
