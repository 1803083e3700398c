"""The parts of a training state."""
