"""What the server does: FedGLAD with the options of pyproject.toml."""

from typing import Any, cast

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedglad.adapters import Glad
from fedglad.averages import EMA
from fedglad.flower import FedGLAD
from fedglad.flower.client import score
from fedglad.optimizers import SGD
from fedglad.samplers import Uniform

from .task import build_model, load_test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run."""
    config = context.run_config
    seed = int(config["seed"])
    model = build_model(seed)
    x, y = load_test()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """The global model after each round, and the average of those that it has been.

        Without test data, leave out evaluate_fn below.
        """
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = score(model, x, y)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    strategy = FedGLAD(
        fraction_evaluate=float(config["fraction-evaluate"]),
        min_available_nodes=int(config["min-nodes"]),
        sampler=Uniform(clients_per_round=int(config["clients-per-round"])),
        optimizer=SGD(lr=float(config["server-lr"])),
        adapter=Glad() if config["adapter"] else None,
        # The model to deploy: averaged.safetensors in the run's folder, `strategy.averaged` here.
        average=EMA() if config["average"] else None,
        evaluate="both" if config["average"] else "model",  # what clients test, if they do
        seed=seed,
        nodes="partition-id",  # what `describe` of client_app.py answers
        node_timeout=float(config["node-timeout"]),
        on_short=cast(Any, config["on-short"]),
        round_timeout=float(config["round-timeout"]),
        quorum=float(config["quorum"]),
        grace=float(config["grace"]),
        quarantine=int(config["quarantine"]),
        max_skipped=float(config["max-skipped"]),
        checkpoint_dir=str(config["out"]),
        resume=bool(config["resume"]),
    )
    strategy.start(
        grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
