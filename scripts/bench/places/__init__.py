"""What saves into object stores and loads from them, and the services on loopback that stand in for these."""
