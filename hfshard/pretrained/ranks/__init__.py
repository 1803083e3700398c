"""Transformers models of which each rank has a part."""
