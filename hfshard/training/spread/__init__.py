"""Training states whose tensors are spread over ranks: each rank saves and restores its part."""
