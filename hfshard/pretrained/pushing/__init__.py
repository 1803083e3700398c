"""What the mixin pushes: a model straight from memory, or saved files, with its card."""
