"""A directory that serves as a hub: commits side by side, files linked."""
