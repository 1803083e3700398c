"""The crash-safe step from one checkpoint in a directory to the next."""
