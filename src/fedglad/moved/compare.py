"""Moved to `fedglad.analysis.comparison`; this name stays for 0.1."""

from fedglad.analysis.comparison import *  # noqa: F403
