"""A site's work by fedglad's own training loop: the bits are those of the simulator.

The loop is the one that Flower's clients have; it knows nothing of messages.
"""

from fedglad.flower.client import fit as fit
from fedglad.flower.client import score as score
