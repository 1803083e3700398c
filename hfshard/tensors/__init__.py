"""Tensors as bytes, and their names."""
