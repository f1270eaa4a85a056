"""Property tests draw the same examples in every run; parallel test processes share the cores."""

import gc
import os
from collections.abc import Generator
from functools import cache
from pathlib import Path
from shutil import disk_usage

import pytest
import torch
import typer.testing
from cluster_support import nodes, three
from hypothesis import settings
from typer.main import get_command

__all__ = ["nodes", "three"]  # one cluster for all tests that ask for it

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "HF_HUB_OFFLINE": "1"}  # read when imported

# Building the command takes twenty times as long as most tests' use of it; it has no state.
typer.testing._get_command = cache(get_command)  # pyright: ignore[reportPrivateImportUsage]

# Files of tests lie in memory where there is room: not one test of a run is about the disk itself,
# and most of a small run's time is spent waiting for it. `--basetemp` has them somewhere else.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and disk_usage(MEMORY).free > 6 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Modules and tests are collected once and stay: searched for garbage, they take half of that time,
# and forked processes would copy each page that a search touches.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Which code was trusted is no business of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGLAD_STATE", str(tmp_path_factory.mktemp("state")))
        yield
