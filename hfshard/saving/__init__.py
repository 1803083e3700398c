"""From a request to files on the disk: plan, write, index, commit."""
