"""Data loaders: the order of an epoch, the seeds of each batch, and the position in it."""
