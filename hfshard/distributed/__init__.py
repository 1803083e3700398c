"""Models and tensors spread over many ranks: each rank saves and loads its own part."""
