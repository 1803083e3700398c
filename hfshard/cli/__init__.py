"""The command line: `hfshard inspect` and `hfshard verify`."""
