"""State that is matched by position: it follows what it belongs to into another order, or is refused by name."""
