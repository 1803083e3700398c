"""Data loaders: the order of each epoch, the seeds of each batch, and the position that is saved."""
