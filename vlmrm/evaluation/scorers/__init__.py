"""The entries of the table of a sweep: checkpoints of trainings, and any other scorer."""
