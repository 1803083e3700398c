"""The directory of a run: its checkpoints as they are written, found, rotated and sent to hubs."""
