"""One strategy on one model; seconds of each round and the peak memory of this process."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg

app = ServerApp()

CNN = [(32, 1, 3, 3), (32,), (64, 32, 3, 3), (64,), (128, 9216), (128,), (10, 128), (10,)]
NORM = [(768,), (768,)]
LAYER = [*4 * [(768, 768), (768,)], *NORM, (3072, 768), (3072,), (768, 3072), (768,), *NORM]
MODELS: dict[str, list[tuple[int, ...]]] = {
    "cnn": CNN,  # 1,199,882
    "distilbert": [(30_522, 768), (512, 768), *NORM, *6 * LAYER],  # 66,362,880
}


def strategy(name: str, clients: int) -> Any:
    settings: dict[str, Any] = {
        "fraction_evaluate": 0.0,
        "min_train_nodes": clients,
        "min_available_nodes": clients,
    }
    if name == "flower-fedavg":
        return FedAvg(**settings)
    if name == "flower-fedadam":
        return FedAdam(**settings)
    from fedglad.flower import FedGLAD, Monitor
    from fedglad.optimizers import SGD, Adam

    if name == "monitor":
        return Monitor(FedAvg(**settings))
    return FedGLAD(**settings, optimizer=Adam() if name == "fedglad-adam" else SGD(), nodes="id")


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    rng = np.random.default_rng(0)
    arrays = ArrayRecord()
    for k, shape in enumerate(MODELS[str(config["model"])]):
        arrays[f"tensor{k}"] = Array(np.float32(0.02) * rng.standard_normal(shape, np.float32))
    begun: list[float] = []
    push = grid.push_messages

    def timed(messages: Any) -> Any:
        messages = list(messages)
        if messages:
            begun.append(time.perf_counter())
        return push(messages)

    grid.push_messages = timed  # both kinds of strategies begin a round with it
    chosen = strategy(str(config["strategy"]), int(config["clients"]))
    chosen.start(grid, arrays, num_rounds=int(config["rounds"]))
    ends = [*begun[1:], time.perf_counter()]
    found = {
        "seconds": [end - begin for begin, end in zip(begun, ends, strict=True)],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    Path(str(config["out"])).write_text(json.dumps(found))
