"""Training checkpoints: saved, killed, damaged, resumed; and what the tests of several rooms share."""
