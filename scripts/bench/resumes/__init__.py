"""Trainings that are killed and resumed by several libraries: the task, the ways and the cases."""
