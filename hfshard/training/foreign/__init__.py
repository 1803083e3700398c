"""Checkpoints of training runs that other programs have saved: read without running any code, and resumed."""
