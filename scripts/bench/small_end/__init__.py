"""Questions at the small end: models of 90 MB, tiny tensors, plans, imports."""
