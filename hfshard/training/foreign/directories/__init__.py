"""Directories of many files that other programs save a run in: transformers' Trainer and Accelerate."""
