"""The parts of the test Hub server; its public face is tests/hub_server.py."""
