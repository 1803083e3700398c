"""The parts of a training state, each turned into tensors and plain values that are stored without pickle."""
