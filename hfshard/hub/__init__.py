"""Hubs: pushes as one commit, and pulls that are checked; the Hugging Face Hub, or a directory in its place."""
