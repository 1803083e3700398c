"""The parts of the test Hub server; its public face is tests/hubserver/hub_server.py."""
