"""From shards to shards of another size; the bytes are copied, never decoded."""
