"""What ranks tell each other without collectives: keys of a store whose calls end, and signs of life."""
