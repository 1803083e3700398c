"""The sweeps: do something to a place, break it at each of its points, and judge what is there then."""
