"""Success rewards from frames: collect labelled frames, train a classifier of success, and train policies with it."""
