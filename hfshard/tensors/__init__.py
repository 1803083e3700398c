"""Tensors: their bytes and their names."""
