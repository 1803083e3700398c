"""What a training state is made of, each as tensors and plain values that go into files without pickle."""
