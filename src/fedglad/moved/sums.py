"""Moved to `fedglad.server.from_sums`; this name stays for 0.1."""

from fedglad.server.from_sums import *  # noqa: F403
