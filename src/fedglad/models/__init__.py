"""Models, one file a family; known to the configuration alone.

    from fedglad.models import FedOptCNN

May import data, for weights and vectors that are fetched as data sets are, and nothing else.

| name | file | what it is |
|---|---|---|
| softmax | `softmax.py` | softmax regression |
| mlp | `mlp.py` | dense layers with ReLU |
| cnn | `cnn.py` | the CNN of FedOpt and FedGLAD's MNIST experiments, 1,199,882 parameters |
| small-cnn | `cnn.py` | a CNN for images of 8×8 pixels, 9,930 parameters |
| resnet56 | `resnet.py` | the paper's, of bottleneck blocks: 591,322 parameters |
| resnet56-basic | `resnet.py` | that of He et al., of basic blocks: 853,018 parameters |
| resnet56-gn | `resnet.py` | `resnet56` with GroupNorm |
| encoder | `encoder.py` | DistilBERT, MiniLM or another of Hugging Face, for texts; LoRA |
| bilstm | `bilstm.py` | a BiLSTM over GloVe vectors, for texts |

A model is a frozen dataclass of settings whose `build()` gives the module, initialised from
torch's generator, and from what was fetched: seed it, and the same model comes out. The modules
themselves are in `networks/`, so that reading settings loads no torch.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.models.bilstm import BiLSTM as BiLSTM
    from fedglad.models.cnn import FedOptCNN as FedOptCNN
    from fedglad.models.cnn import SmallCNN as SmallCNN
    from fedglad.models.encoder import Encoder as Encoder
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
}
