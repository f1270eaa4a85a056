"""A Flower client's work by fedglad's own training loop: the bits are those of the simulator."""

from fedglad.federation.client import fit as fit
from fedglad.federation.client import metrics as metrics
from fedglad.federation.client import score as score
