"""Small helpers: paths, the progress bar, rejected arguments, and work in threads."""
