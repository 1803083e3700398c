"""Other frameworks' checkpoint directories as tables of byte runs, read from their metadata alone."""
