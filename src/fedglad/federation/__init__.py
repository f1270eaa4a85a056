"""What a real federation needs whoever carries its messages: a run's session and folder, metrics.

Knows the driver of rounds, runs and their configuration; no transport is imported here. NVFlare is
built on all of it; Flower, which has more to do for its nodes and folders, on metrics and clients.
"""
