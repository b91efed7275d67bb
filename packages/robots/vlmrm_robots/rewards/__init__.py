"""Rewards of trajectories: published models, and a judge."""
