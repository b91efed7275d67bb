"""Tiny checkpoints of every image-text family, and the table of what a shared batch of each is compared with."""
