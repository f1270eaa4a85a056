"""What a real federation needs whoever carries its messages: a run's session and folder, metrics.

Knows the driver of rounds, runs and their configuration; no transport is imported here. NVFlare is
built on it; Flower, which has more to do for its nodes and folders, has these parts itself.
"""
