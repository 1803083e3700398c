"""The zoo: tiny models of every kind that transformers has, on which hfshard and transformers must agree."""
