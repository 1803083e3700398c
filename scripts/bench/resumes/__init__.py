"""Trainings that are killed and resumed in each of several ways: the task, the ways and the cases."""
