"""Storage for torch.distributed.checkpoint: what it saves and loads are Hugging Face checkpoints."""
