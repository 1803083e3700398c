"""What a push is made of: what was asked for, the files here and there, and the commit between them."""
