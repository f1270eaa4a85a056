"""Moved to `fedglad.analysis.recording`; this name stays for 0.1."""

from fedglad.analysis.recording import *  # noqa: F403
