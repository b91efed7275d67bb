"""Fixtures of every test of rewards: the core's, of judges."""

from judge_fixtures import *  # noqa: F403
