"""Mutated files for every reader: each must meet one `HfshardError`, or give the bytes that stand in the files."""
