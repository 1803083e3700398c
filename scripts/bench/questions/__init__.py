"""The questions that are measured, one module each: its peers, its inputs and how its answer reads."""
