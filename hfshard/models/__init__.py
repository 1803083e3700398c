"""Models of transformers, and plain modules."""
