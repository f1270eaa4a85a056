"""Data sets, and how their samples come to clients; known to the configuration alone.

| file | what it has |
|---|---|
| `federation.py` | what a simulation asks of a data set, and `Partitioned`, a set in memory |
| `partition/` | which samples each client owns, one file a partition, with a registry of its own |
| `split.py` | the settings that every partitioned data set has |
| `picture.py` | a partition as numbers, in the terminal and as a PNG |
| `digits.py` | 1,797 handwritten digits of 8×8 pixels, bundled |
| `images.py` | MNIST and CIFAR-10: stored bytes to a model's inputs, augmented in training |
| `texts.py` | 20 Newsgroups and AG News as token ids |
| `tokens.py`, `words.py`, `encoders.py` | tokenised once: by words, or as an encoder was trained |
| `vectors.py` | GloVe word vectors |
| `store.py`, `fetch.py`, `packages.py`, `sources/` | how a set gets here: cache, means, sets |
| `synthetic.py` | Synthetic(α, β): logistic data for any number of clients, made when asked |

A data set is a frozen dataclass of settings whose `load_federation()` gives a `Federation`. Only
`fedglad.rng` is imported from the rest of the library.
"""

REGISTRY = {
    "digits": "fedglad.data.digits:Digits",
    "synthetic": "fedglad.data.synthetic:Synthetic",
    "mnist": "fedglad.data.images:MNIST",
    "cifar10": "fedglad.data.images:CIFAR10",
    "20news": "fedglad.data.texts:TwentyNews",
    "agnews": "fedglad.data.texts:AGNews",
    "agnews-76k": "fedglad.data.texts:AGNews76k",
}
