"""Rewards of robots and simulators: labelled frames, classifiers of success, and models of trajectories."""

from __future__ import annotations

from vlmrm.libraries import PACKAGES

__version__ = "0.1.0"

# The extra, and its packages by the names that they are imported by: one that is missing is one sentence.
FRAMES = "vlmrm-robots[frames]"
PACKAGES[FRAMES] = ("torch", "torchvision", "scipy", "gymnasium", "pygame")
