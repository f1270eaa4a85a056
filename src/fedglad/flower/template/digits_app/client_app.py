"""What a client does when the server asks. Its data stay here; only weights and counts leave."""

from typing import cast

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedglad.flower.client import fit, score
from fedglad.rng import stream

from .task import CLIENT, build_model, load_client

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round: take over the global model, train it on the own samples, send it back."""
    model, (x, y) = _received(message, context), _samples(context)
    # The batches of this client in this round: the same in every run with this seed.
    t = cast(int, message.content["config"]["server-round"]) - 1
    rng = stream(_seed(context), "client", t, _partition(context)[0])
    loss = fit(model, CLIENT, x, y, rng)  # or your own loop: train `model` in place
    metrics = MetricRecord({"num-examples": len(y), "train_loss": loss})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The global model on the own samples."""
    x, y = _samples(context)
    loss, accuracy = score(_received(message, context), x, y)
    metrics = MetricRecord({"num-examples": len(y), "loss": loss, "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.query("fedglad")
def describe(message: Message, context: Context) -> Message:
    """Who this is: asked once, so that a client is known again in the next run.

    For a sampler that draws by size, such as MD, add "num-examples".
    """
    metrics = MetricRecord({"partition-id": _partition(context)[0]})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _received(message: Message, context: Context) -> nn.Module:
    model = build_model(_seed(context))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    return model


def _samples(context: Context) -> tuple[Tensor, Tensor]:
    return load_client(*_partition(context))


def _partition(context: Context) -> tuple[int, int]:
    """Which client of how many: `flower-supernode --node-config`; a simulation sets it itself."""
    return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])


def _seed(context: Context) -> int:
    return int(context.run_config["seed"])
