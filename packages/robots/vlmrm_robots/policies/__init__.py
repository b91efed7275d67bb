"""Policies trained with rewards from frames, and what they truly learned: examples to copy."""
