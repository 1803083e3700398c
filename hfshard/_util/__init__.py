"""Small helpers: paths, the progress bar, refused arguments, and work in threads."""
