"""`hfshard run`: a program that nobody edits, with hfshard on in it and in the processes that it starts."""
