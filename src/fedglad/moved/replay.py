"""Moved to `fedglad.analysis.replaying`; this name stays for 0.1."""

from fedglad.analysis.replaying import *  # noqa: F403
