"""A NumPy client whose step depends on itself and the round, and on nothing else."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def as_reported(message: Message, context: Context, call_next: Any) -> Message:
    """Masks the reply in a run with `report = "secure"`."""
    if context.run_config["report"] != "secure":
        return call_next(message, context)
    from fedglad.flower import secure_sum

    return secure_sum(message, context, call_next)


@app.train(mods=[as_reported])
def train(message: Message, context: Context) -> Message:
    sent, config = message.content["arrays"], message.content["config"]
    assert isinstance(sent, ArrayRecord)
    assert isinstance(config, ConfigRecord)
    client, t = int(context.node_config["partition-id"]), int(str(config["server-round"]))
    here, asked = f"{client}/{t}", context.run_config
    marks = Path(str(asked["marks"]))
    if asked["marks"]:
        (marks / here.replace("/", "-")).touch()
    if here == asked["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if here in (asked["hangs"], asked["slow"]):
        time.sleep(3600)
    if here == asked["naps"]:
        time.sleep(45)
    rng = np.random.default_rng([client, t])
    moved = ArrayRecord()
    for name, array in sent.items():
        value = array.numpy()
        step = 0.9 * value + 0.1 * client + 0.01 * rng.standard_normal(value.shape)
        moved[name] = Array(step.astype(value.dtype))
    metrics = MetricRecord({"num-examples": 10 + client, "train_loss": float(t)})
    return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)


@app.query("fedglad")
def describe(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    metrics = MetricRecord({"partition-id": client, "num-examples": 10 + client})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
