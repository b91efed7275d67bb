"""Fixtures of every test of rewards: the core's, of judges."""

from tests.rewards.judges.judge_fixtures import *  # noqa: F403
