"""The rewards that come with vlmrm; `vlmrm.rewards.registry.BUILT_IN` has their names."""
