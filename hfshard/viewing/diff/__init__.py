"""What differs between two checkpoints, tensor by tensor."""
