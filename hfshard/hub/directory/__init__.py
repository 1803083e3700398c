"""A directory that serves as a hub: commits next to each other, with linked files."""
