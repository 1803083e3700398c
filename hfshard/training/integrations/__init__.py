"""transformers' Trainer, Accelerate and Lightning."""
