"""The directory of a run: how its checkpoints are written, found, checked and rotated."""
