"""A checkpoint for reading."""
