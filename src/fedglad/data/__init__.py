"""Data sets, and how their samples come to clients.

>>> from fedglad.data import Digits
>>> federation = Digits(clients=20, alpha=0.5).load_federation()
>>> inputs, labels = federation.client(3)  # what client 3 trains on
>>> federation.clients, len(labels) == federation.size(3)
(20, True)

| file | what it has |
|---|---|
| `federation.py` | what a simulation asks of a data set, and `Partitioned`, a set in memory |
| `partition/` | which samples each client owns, with a registry of partitions |
| `split.py` | the settings that every partitioned data set has |
| `picture.py` | a partition as numbers and in the terminal |
| `digits.py` | 1,797 handwritten digits of 8×8 pixels, bundled |
| `images.py`, `pixels.py` | MNIST and CIFAR-10; bytes to a model's inputs, augmented in training |
| `texts.py` | 20 Newsgroups and AG News as token ids |
| `tokens.py`, `words.py`, `encoders.py` | tokenised once: by words, or as an encoder was trained |
| `vectors.py` | GloVe word vectors |
| `store.py`, `fetch.py`, `packages.py`, `sources/` | fetching: the cache, the means, the sets |
| `synthetic.py` | Synthetic(α, β): logistic data for any number of clients, made when asked |

A data set is a frozen dataclass of settings whose `load_federation()` gives a `Federation`. Only
`fedglad.rng` and `fedglad.core` are imported from the rest of the library.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.data.digits import Digits as Digits
    from fedglad.data.federation import Federation as Federation
    from fedglad.data.federation import Partitioned as Partitioned
    from fedglad.data.images import CIFAR10 as CIFAR10
    from fedglad.data.images import MNIST as MNIST
    from fedglad.data.split import Split as Split
    from fedglad.data.synthetic import Synthetic as Synthetic
    from fedglad.data.texts import AGNews as AGNews
    from fedglad.data.texts import AGNews76k as AGNews76k
    from fedglad.data.texts import TwentyNews as TwentyNews

__getattr__, __dir__ = lazily(__name__)

REGISTRY = {
    "digits": "fedglad.data.digits:Digits",
    "synthetic": "fedglad.data.synthetic:Synthetic",
    "mnist": "fedglad.data.images:MNIST",
    "cifar10": "fedglad.data.images:CIFAR10",
    "20news": "fedglad.data.texts:TwentyNews",
    "agnews": "fedglad.data.texts:AGNews",
    "agnews-76k": "fedglad.data.texts:AGNews76k",
}
