"""A round of NVFlare with its own FedAvg and with ours: `make bench BENCH=flare`.

NVFlare's simulator with four sites on this machine, whose clients train nothing: what is measured
is everything but training. Seconds from one round's task to the next, which both log. The two
controllers take turns, `--repeats` times; the median round counts.

    python benchmarks/flare.py [--rounds 8] [--repeats 3] [--quick]
"""

import importlib.util
import re
import statistics
import sys
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from _shared import load, machine, options, table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.flare.simulator import Job, Simulation  # noqa: E402 - it lies beside the tests

SITES = 4
MODELS = {"mlp of 30": "net.Net", "mlp of 1.2 M": "net.Large"}
CONTROLLERS = {
    "NVFlare's FedAvg": "nvflare.app_common.workflows.fedavg.FedAvg",
    "`FedGLAD`": "fedglad.nvflare.FedGLAD",
}
PERSISTOR = "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor"
SENT = re.compile(r"^(\S+ \S+) - INFO - Sending task train", re.M)


def main() -> None:
    assert __doc__
    given = options(__doc__.splitlines()[0], rounds=8, repeats=3).parse_args()
    rounds, repeats = (3, 1) if given.quick else (given.rounds, given.repeats)
    if importlib.util.find_spec("nvflare") is None:
        sys.exit("NVFlare is not installed: pip install 'fedglad[nvflare]'")
    print(f"{machine()}; load before {load()}")
    found: dict[tuple[str, str], list[float]] = {}
    for model in MODELS:
        for k in range(repeats):
            for name in CONTROLLERS if k % 2 == 0 else [*CONTROLLERS][::-1]:
                seconds = measure(name, MODELS[model], rounds)
                found.setdefault((model, name), []).extend(seconds)
                print(model, name, seconds, flush=True, file=sys.stderr)
    rows: list[list[Any]] = []
    for model in MODELS:
        medians = [statistics.median(found[model, name]) for name in CONTROLLERS]
        rows.append([model, *(f"{one:.2f}" for one in medians), f"{medians[1] / medians[0]:.2f}"])
    table(["model", *(f"{name}, s a round" for name in CONTROLLERS), "ratio"], rows)
    print(f"load after {load()}")


def measure(controller: str, model: str, rounds: int) -> list[float]:
    """Seconds of each round but the first, in which the sites start."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        arguments: dict[str, Any] = {"num_clients": SITES, "num_rounds": rounds + 1}
        if controller == "`FedGLAD`":
            arguments["checkpoint_dir"] = str(folder / "out")
        persistor = {"path": PERSISTOR, "args": {"model": {"path": model, "args": {}}}}
        job = Job(folder / "job", arguments, persistor=persistor, path=CONTROLLERS[controller])
        done = Simulation(Path(sys.executable), job.write(), SITES, folder / "workspace").wait()
        if done.code:
            sys.exit(f"{controller} failed:\n{done.output[-3000:]}")
    sent = [datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f") for at in SENT.findall(done.output)]
    gaps = [(after - before).total_seconds() for before, after in pairwise(sent)]
    return gaps[1:]


if __name__ == "__main__":
    main()
