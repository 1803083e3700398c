"""Modules that save and load themselves in the way of the Hub: `ShardedModelMixin`, and what it does for plain ones."""
