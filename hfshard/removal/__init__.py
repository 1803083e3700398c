"""What is removed from a directory, a run or a store, in which order, and what stays."""
