"""What every real federation has in common: a run's session and folder, metrics, a client's work.

Knows the driver of rounds, runs and their configuration; Flower's and NVFlare's transports build
on it. No transport is imported here.
"""
