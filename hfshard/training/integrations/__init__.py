"""transformers' Trainer and Accelerate."""
