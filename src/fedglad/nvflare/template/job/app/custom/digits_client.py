"""What a site does when the server asks. Its data stay here; only weights and counts leave."""

import nvflare.client as flare  # pyright: ignore[reportMissingTypeStubs]
from digits_task import CLIENT, SEED, Net, load_client, partition_of

from fedglad.federation.client import fit
from fedglad.rng import stream

flare.init()
site = flare.get_site_name()
x, y = load_client(site)
model = Net()
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    model.load_state_dict(received.params or {})
    # The batches of this site in this round: the same in every run with this seed.
    rng = stream(SEED, "client", received.current_round or 0, partition_of(site))
    loss = fit(model, CLIENT, x, y, rng)  # or your own loop: train `model` in place
    reply = flare.FLModel(
        params=model.state_dict(),
        metrics={"train_loss": loss},
        meta={"NUM_STEPS_CURRENT_ROUND": len(y)},  # its weight
    )
    flare.send(reply)
