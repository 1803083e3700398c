"""Real frameworks that train nasty models on real ranks and save them, along with the truth gathered from memory."""
