"""Fixtures of every test of judges."""

from tests.rewards.judges.judge_fixtures import *  # noqa: F403
