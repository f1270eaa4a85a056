"""Data sets, and how their samples come to clients.

`federation` is what a simulation asks of a data set; `partition/` and `split` say which samples
each client owns, `validation` which none does, `picture` shows it. `digits`, `images`, `texts`,
`plays` and `synthetic` are the sets; `pixels`, `tokens`, `words`, `encoders` and `vectors` make a
model's inputs of them; `store`, `fetch`, `packages` and `sources/` get and keep their files.
`bring`, `columns` and `folder` make a federation of what users have: arrays, torch data sets,
tables, files.

A data set is a frozen dataclass of settings whose `load_federation()` gives a `Federation`. Only
`fedglad.rng` and `fedglad.core` are imported from the rest of the library.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.data.bring import from_arrays as from_arrays
    from fedglad.data.bring import from_datasets as from_datasets
    from fedglad.data.columns import from_flower as from_flower
    from fedglad.data.columns import from_huggingface as from_huggingface
    from fedglad.data.digits import Digits as Digits
    from fedglad.data.federation import Federation as Federation
    from fedglad.data.federation import Partitioned as Partitioned
    from fedglad.data.folder import from_folder as from_folder
    from fedglad.data.images import CIFAR10 as CIFAR10
    from fedglad.data.images import MNIST as MNIST
    from fedglad.data.images import FashionMNIST as FashionMNIST
    from fedglad.data.plays import Shakespeare as Shakespeare
    from fedglad.data.split import Split as Split
    from fedglad.data.synthetic import Synthetic as Synthetic
    from fedglad.data.texts import AGNews as AGNews
    from fedglad.data.texts import AGNews76k as AGNews76k
    from fedglad.data.texts import TwentyNews as TwentyNews
    from fedglad.data.validation import held_out as held_out

__getattr__, __dir__ = lazily(__name__)

REGISTRY = {
    "digits": "fedglad.data.digits:Digits",
    "synthetic": "fedglad.data.synthetic:Synthetic",
    "mnist": "fedglad.data.images:MNIST",
    "fashion-mnist": "fedglad.data.images:FashionMNIST",
    "cifar10": "fedglad.data.images:CIFAR10",
    "20news": "fedglad.data.texts:TwentyNews",
    "agnews": "fedglad.data.texts:AGNews",
    "agnews-76k": "fedglad.data.texts:AGNews76k",
    "shakespeare": "fedglad.data.plays:Shakespeare",
}
