"""Modules and named tensors: wrappers, shared tensors, and which names fit which."""
