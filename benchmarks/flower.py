"""A round of Flower with its own strategies and with ours: `make bench BENCH=flower`.

A real SuperLink and ten SuperNodes on this machine, whose clients train nothing: what is measured
is everything but training. Seconds of a round, and the peak memory of the ServerApp's process,
which is a new one for every row. Rows are run in turn, `--repeats` times; the best round counts.

    python benchmarks/flower.py [--rounds 3] [--repeats 2] [--only fedglad] [--model cnn] [--quick]
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _shared import load, machine, options, table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.flower import deployment  # noqa: E402 - it lies beside the tests
from tests.flower.deployment import Federation  # noqa: E402

CLIENTS = 10
APP = ROOT / "benchmarks" / "flower_app"
STRATEGIES = ["flower-fedavg", "fedglad", "flower-fedadam", "fedglad-adam", "monitor"]
MODELS = {"cnn": "1.2 M", "distilbert": "66 M"}


def main() -> None:
    assert __doc__
    parser = options(__doc__.splitlines()[0], rounds=3, repeats=2)
    parser.add_argument("--only", action="append", choices=STRATEGIES, help="of the strategies")
    parser.add_argument("--model", choices=MODELS, help="one of the models")
    given = parser.parse_args()
    rounds, repeats = (1, 1) if given.quick else (given.rounds, given.repeats)
    models = [given.model] if given.model else ["cnn"] if given.quick else list(MODELS)
    deployment.RUN = 3600.0
    print(f"{machine()}; load before {load()}")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Federation(Path(folder), nodes=CLIENTS) as federation,
    ):
        for model in models:
            for _ in range(repeats):
                for name in given.only or STRATEGIES:
                    # From its second round on Flower's FedAdam sends float64: ten clients of the
                    # large model then need more than 24 GB.
                    once = (name, model) == ("flower-fedadam", "distilbert")
                    row = measure(federation, name, model, 1 if once else rounds, Path(folder))
                    before = found.setdefault((model, name), row)
                    before["seconds"] = min(before["seconds"], row["seconds"])
                    before["peak"] = min(before["peak"], row["peak"])
                    print(model, name, row, flush=True, file=sys.stderr)
    rows = [
        [MODELS[model], name, f"{row['seconds']:.2f}", f"{row['peak']:,.0f}"]
        for (model, name), row in found.items()
    ]
    table(["parameters", "strategy", "s a round", "server peak, MB"], rows)
    print(f"load after {load()}")


def measure(
    federation: Federation, name: str, model: str, rounds: int, folder: Path
) -> dict[str, Any]:
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    config = {"strategy": name, "model": model, "clients": CLIENTS, "rounds": rounds}
    done = federation.run(APP, {**config, "out": str(out)})
    if not out.is_file():
        sys.exit(f"{name} on {model} failed:\n{done.log[-3000:]}")
    result = json.loads(out.read_text())
    return {"seconds": min(result["seconds"]), "peak": result["peak"]}


if __name__ == "__main__":
    main()
