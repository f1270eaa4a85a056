"""Models, one file a family; known to the configuration alone.

May import data, for weights and vectors that are fetched as data sets are, and nothing else.

A model is a frozen dataclass of settings whose `build()` gives the module, initialised from
torch's generator, and from what was fetched: seed it, and the same model comes out. The modules
themselves are in `networks/`, so that reading settings loads no torch. `fedglad list models` has a
line about each.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.models.bilstm import BiLSTM as BiLSTM
    from fedglad.models.cnn import FedOptCNN as FedOptCNN
    from fedglad.models.cnn import SmallCNN as SmallCNN
    from fedglad.models.encoder import Encoder as Encoder
    from fedglad.models.language import CharLSTM as CharLSTM
    from fedglad.models.language import TinyGPT as TinyGPT
    from fedglad.models.mlp import MLP as MLP
    from fedglad.models.resnet import ResNet56 as ResNet56
    from fedglad.models.resnet import ResNet56Basic as ResNet56Basic
    from fedglad.models.resnet import ResNet56GroupNorm as ResNet56GroupNorm
    from fedglad.models.softmax import SoftmaxRegression as SoftmaxRegression

__getattr__, __dir__ = lazily(__name__)

REGISTRY = {
    "softmax": "fedglad.models.softmax:SoftmaxRegression",
    "mlp": "fedglad.models.mlp:MLP",
    "cnn": "fedglad.models.cnn:FedOptCNN",
    "small-cnn": "fedglad.models.cnn:SmallCNN",
    "resnet56": "fedglad.models.resnet:ResNet56",
    "resnet56-basic": "fedglad.models.resnet:ResNet56Basic",
    "resnet56-gn": "fedglad.models.resnet:ResNet56GroupNorm",
    "encoder": "fedglad.models.encoder:Encoder",
    "bilstm": "fedglad.models.bilstm:BiLSTM",
    "char-lstm": "fedglad.models.language:CharLSTM",
    "tiny-gpt": "fedglad.models.language:TinyGPT",
}
