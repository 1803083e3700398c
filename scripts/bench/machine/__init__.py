"""The machine: what it is, what it can do, and the state of its page cache and memory before a run."""
