"""Other programs' checkpoints."""
