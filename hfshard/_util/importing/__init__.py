"""Imports that wait until a name is used, and what happens when a module is imported."""
