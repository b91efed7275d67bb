"""The reward service: one server, many rewards, every trainer's protocol."""
