"""The crash sweep: stop a save at each of its file-changing system calls, and ask every reader what it then loads."""
