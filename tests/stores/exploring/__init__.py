"""Explores what the code of saves and loads does in stores: every order of requests, with faults, late ones, and kills."""
