"""Moved to `fedglad.clients`; this name stays for 0.1."""

from fedglad.clients.local_optimizers import *  # noqa: F403
from fedglad.clients.method import *  # noqa: F403
from fedglad.clients.workbench import *  # noqa: F403
