"""Checkpoints as they are, from one place to another: directories, stores and hubs."""
