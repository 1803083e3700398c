"""Where a load comes from: a directory, a store, a hub."""
