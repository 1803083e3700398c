"""All that knows transformers: the mixin, and how its models are collected, built and pushed."""
