"""Data sets, and how their samples come to clients; known to the configuration alone.

| file | what it has |
|---|---|
| `federation.py` | what a simulation asks of a data set, and `Partitioned`, a set in memory |
| `partition.py` | which samples each client owns, with a registry of its own |
| `digits.py` | 1,797 handwritten digits of 8×8 pixels, bundled |
| `synthetic.py` | Synthetic(α, β): logistic data for any number of clients, made when asked |

A data set is a frozen dataclass of settings whose `load_federation()` gives a `Federation`. Only
`fedglad.rng` is imported from the rest of the library.
"""

REGISTRY = {
    "digits": "fedglad.data.digits:Digits",
    "synthetic": "fedglad.data.synthetic:Synthetic",
}
