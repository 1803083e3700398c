"""The command line: `hfshard COMMAND`."""
