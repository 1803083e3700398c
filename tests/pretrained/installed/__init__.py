"""Every transformers model of a process, by way of hfshard."""
