"""Whole files from parts on many ranks: who holds which bytes, who writes which file, and how the bytes get there."""
