"""A client without a framework: moves every weight a little and sends all of them back."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    sent, config = message.content["arrays"], message.content["config"]
    assert isinstance(sent, ArrayRecord)
    assert isinstance(config, ConfigRecord)
    client, t = int(context.node_config["partition-id"]), int(str(config["server-round"]))
    rng = np.random.default_rng([client, t])
    moved = ArrayRecord()
    for name, array in sent.items():
        value = array.numpy()
        moved[name] = Array(value - np.float32(1e-3) * rng.standard_normal(value.shape, np.float32))
    metrics = MetricRecord({"num-examples": 100 + client})
    return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)
