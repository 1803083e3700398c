"""Places to load from: directories, stores and hubs."""
