"""Self-contained HTML pages of a checkpoint, of a run, and of the differences between two checkpoints."""
