"""The states of optimizers: by the names of parameters, as exact as they were, with those that they hold."""
