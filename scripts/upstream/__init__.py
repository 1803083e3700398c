"""Runs the tests of transformers, PEFT, Accelerate and huggingface_hub twice: stock, and under hfshard.install()."""
