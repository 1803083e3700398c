"""Object stores and buckets."""
