"""Saves of training states: whole to the bit at every moment."""
