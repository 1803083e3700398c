"""Saves into stores."""
