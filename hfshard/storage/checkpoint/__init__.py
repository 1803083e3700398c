"""A whole checkpoint in a directory: found, opened, checked."""
