"""Moved to `fedglad.runs.sweeping`; this name stays for 0.1."""

from fedglad.runs.sweeping import *  # noqa: F403
