"""Files of torch.save that hold more than tensors: read as descriptions, and never run."""
