"""What is written: headers, indexes, names, digests."""
