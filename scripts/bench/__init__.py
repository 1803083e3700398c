"""Benchmarks: one file a question, over one harness that runs peers interleaved in fresh processes."""
