"""`hfshard diff`: what differs between two checkpoints, on the terminal and as JSON."""
