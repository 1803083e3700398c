"""Tensors as bytes: dtypes, layouts, and what can be stored."""
