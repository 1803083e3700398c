"""The format: names of files, headers, the index and its digests, strict JSON."""
