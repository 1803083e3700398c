"""Tests of our own: on transformers' common ones, or of what upstream's own check that are not in a source archive."""
