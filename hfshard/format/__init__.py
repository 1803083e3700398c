"""The checkpoint format: headers, indexes, names, digests."""
