"""Gradient checkpointing: blocks whose activations are computed again, exactly, in the backward pass."""
