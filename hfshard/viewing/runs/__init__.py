"""The checkpoints of a training run as a list: what each takes, what its metrics are, and what is wrong with it."""
