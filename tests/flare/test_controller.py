"""The controller's settings, and the snippets of its page, where NVFlare is."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "nvflare.md"


def test_without_nvflare_it_is_said_what_to_install():
    if find_spec("nvflare"):
        pytest.skip("NVFlare is installed")
    with pytest.raises(ImportError, match=r"needs NVFlare: pip install 'fedglad\[nvflare\]'"):
        from fedglad.nvflare import FedGLAD as FedGLAD


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_rounds": 0}, "num_rounds=0: must be 1 or more"),
        ({"num_clients": 0}, "num_clients=0: must be 1 or more"),
        ({"num_clients": 3, "sampler": "Uniform()"}, "give one of the two"),
        ({"sampler": "MD()"}, r"MD needs the clients' numbers of samples: sizes="),
        ({"round_timeout": 0}, "must be positive, in seconds"),
        ({"min_clients": 0}, "a round needs at least one client"),
        ({"min_clients": 3, "num_clients": 2}, "more than the 2 clients of a round"),
        ({"retries": -1}, "must be 0 or more"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str):
    pytest.importorskip("nvflare")
    from fedglad import samplers
    from fedglad.nvflare import FedGLAD

    if "sampler" in settings:
        name = settings["sampler"].removesuffix("()")
        settings = {**settings, "sampler": getattr(samplers, name)()}
    with pytest.raises(ValueError, match=message):
        FedGLAD(**settings)


def test_there_is_no_average_before_the_job_runs():
    pytest.importorskip("nvflare")
    from fedglad.nvflare import FedGLAD

    with pytest.raises(ValueError, match="there is no average yet"):
        FedGLAD().averaged  # noqa: B018


@pytest.mark.slow
def test_the_snippets_of_the_page_run(python: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(blocks) == 2
    done = subprocess.run(
        [python, "-c", "\n".join(blocks)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_settings_are_tried_where_nvflare_is(python: Path):
    if python == Path(sys.executable):
        pytest.skip("they were, beside this one")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", __file__]
    done = subprocess.run([*command, "-m", "not slow"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" not in done.stdout
    assert "9 passed, 1 skipped" in done.stdout
