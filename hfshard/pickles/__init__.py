"""Files of torch.save, read without running their code."""
