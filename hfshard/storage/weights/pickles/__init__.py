"""Files of torch.save: read without running any code, checked, and the weights found in them."""
