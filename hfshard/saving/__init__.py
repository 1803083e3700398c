"""Everything that writes a checkpoint."""
