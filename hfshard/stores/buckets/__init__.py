"""Buckets of the Hugging Face Hub as a store, and the Xet storage that they share with its repos."""
