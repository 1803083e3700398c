"""The parts of the test Hub server; its public face is tests/servers/hub/hub_server.py."""
