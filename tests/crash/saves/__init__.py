"""Saves of checkpoints: whole for hfshard, transformers and huggingface_hub at every moment."""
