"""FedGLAD with momentum, whose state must outlive whatever is killed."""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedglad.flower import FedGLAD, SecureSum
from fedglad.optimizers import Momentum
from fedglad.samplers import Uniform

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    rng = np.random.default_rng(0)
    arrays = ArrayRecord({"weight": Array(rng.standard_normal((3, 4)).astype(np.float32))})
    report: Any = str(config["report"])
    strategy = FedGLAD(
        fraction_evaluate=0.0,
        optimizer=Momentum(lr=0.5),
        sampler=Uniform(clients_per_round=int(config["per-round"])),
        nodes="partition-id",
        round_timeout=float(config["timeout"]),
        quorum=float(config["quorum"]),
        grace=float(config["grace"]),
        checkpoint_dir=str(config["out"]),
        resume=True,
        report=SecureSum(threshold=0.5) if report == "secure" else report,
    )
    strategy.start(grid, arrays, num_rounds=int(config["rounds"]))
