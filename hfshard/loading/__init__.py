"""From a name or a path to open files, and from these to tensors."""
