"""The disk: formats, file names, the order of system calls."""
