"""Property tests draw the same examples in every run; parallel test processes share the cores."""

import os
from collections.abc import Generator

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "HF_HUB_OFFLINE": "1"}  # read when imported


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Which code was trusted is no business of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDGLAD_STATE", str(tmp_path_factory.mktemp("state")))
        yield
