"""What loads a checkpoint in the question `load`: models by hfshard and transformers, state dicts by all others."""
