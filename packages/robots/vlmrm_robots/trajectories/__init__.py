"""Trajectories: frames of episodes with a label of success for each, their files, and those of others."""
