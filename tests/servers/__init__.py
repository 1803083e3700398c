"""Servers on loopback that tests start: the Hugging Face Hub with its buckets, and object stores."""
