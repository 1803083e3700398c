"""Pushes that many ranks make together: files are staged by their owners, and the first rank speaks to the hub."""
