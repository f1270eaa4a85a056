"""Models, one file a family; known to the configuration alone, and importing nothing of fedglad.

| name | file | what it is |
|---|---|---|
| softmax | `softmax.py` | softmax regression |
| mlp | `mlp.py` | dense layers with ReLU |
| cnn | `cnn.py` | the CNN of FedOpt and FedGLAD's MNIST experiments, 1,199,882 parameters |
| small-cnn | `cnn.py` | a CNN for images of 8×8 pixels, 9,930 parameters |

A model is a frozen dataclass of settings whose `build()` gives the module, initialised from
torch's generator alone: seed it, and the same model comes out.
"""

REGISTRY = {
    "softmax": "fedglad.models.softmax:SoftmaxRegression",
    "mlp": "fedglad.models.mlp:MLP",
    "cnn": "fedglad.models.cnn:FedOptCNN",
    "small-cnn": "fedglad.models.cnn:SmallCNN",
}
