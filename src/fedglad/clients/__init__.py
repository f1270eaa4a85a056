"""Client methods: the one local training loop, evaluation, and one small file a method.

May import records, rng and layout; imported by the engines.
"""

REGISTRY = {"plain": "fedglad.clients.loop:Plain"}
