"""Hostile and damaged checkpoints, each built byte by byte, and the runner that loads them under watch."""
