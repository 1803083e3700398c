"""Saves by several ranks: the committing one is stopped at each of its calls, and each rank fails in each phase."""
