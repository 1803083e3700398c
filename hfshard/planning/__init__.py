"""Which tensor goes into which file: pure, no byte is read or written."""
