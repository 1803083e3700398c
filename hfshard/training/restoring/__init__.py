"""From a checkpoint back to a training state: everything is read and checked before anything is changed."""
