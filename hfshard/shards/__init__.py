"""Safetensors files: planned, read and written."""
