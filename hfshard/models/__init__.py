"""transformers models and plain modules."""
