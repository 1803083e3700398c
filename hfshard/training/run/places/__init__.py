"""Where the checkpoints of a run lie: a directory, or a store."""
