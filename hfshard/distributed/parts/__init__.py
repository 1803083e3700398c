"""Boxes of stored tensors, read into the memory of those who want them."""
