"""Gradient checkpointing: blocks that are run again in the backward pass, exactly."""
