"""Files of weights: safetensors written, streamed and read, and legacy pickles read."""
