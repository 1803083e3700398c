"""Saves into stores with a fault at every request: what loads is wholly old or new, and the next save tidies up."""
