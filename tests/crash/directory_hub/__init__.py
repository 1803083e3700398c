"""Changes of a hub in a directory: whole commits behind every ref at every moment."""
