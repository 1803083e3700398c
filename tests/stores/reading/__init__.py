"""Loads from stores: what is read, how much of it, and that it is of one save."""
