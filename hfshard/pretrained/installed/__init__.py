"""`hfshard.install()`: every transformers model of a process saves, pushes and loads by way of hfshard."""
