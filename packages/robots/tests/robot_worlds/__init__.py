"""Worlds, policies and classifiers for tests of robots."""
