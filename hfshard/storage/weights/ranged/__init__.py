"""Safetensors files that are read by ranges of bytes, out of a store or a hub."""
