"""The reward service, measured from outside: clients are in this process, servers in others."""
