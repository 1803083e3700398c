"""Pages of HTML that need nothing beside them: one of a checkpoint, of a run, of what differs between two."""
