"""FedGLAD: federated learning that knows when to trust its aggregated gradients.

    from fedglad import Glad, Server
    from fedglad.optimizers import Adam

    server = Server(model, optimizer=Adam(lr=5e-3), adapter=Glad())
    record = server.step(updates)
    model.load_state_dict(server.state)

Importing it loads torch and numpy only; safetensors is loaded by `Server.save` and `Server.load`.
"""

from fedglad.adapters import Glad
from fedglad.records import Record, Statistics, Update
from fedglad.server import Server
from fedglad.validate import Guard

__all__ = ["Glad", "Guard", "Record", "Server", "Statistics", "Update"]
