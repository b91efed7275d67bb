"""Fixtures of every test of judges."""

from judge_fixtures import *  # noqa: F403
