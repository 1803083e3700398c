"""Bugs that are planted to see whether a test still holds each guarantee; scripts/mutants runs them."""
