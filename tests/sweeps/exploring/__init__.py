"""Explores saves and loads in stores: every order of their requests, with faults, late ones, and kills."""
