"""What the Hub of the tests keeps for buckets and for Xet: names of files, and the xorbs that their bytes lie in."""
