"""Small helpers: the progress bar, refused arguments, and work in threads."""
