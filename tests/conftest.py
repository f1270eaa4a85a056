"""Property tests draw the same examples in every run; parallel test processes share the cores."""

import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)
