"""What a model is trained for: the loss, the metrics, and which of them is the score.

A task is a frozen dataclass of settings with `loss(model, batch)` and `metrics(model, batch)`.
Only `fedglad.records` and `fedglad.core` are imported from the rest of the library.

>>> from fedglad import simulate
>>> [task for task in REGISTRY][:2]
['classification', 'multilabel']
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.tasks.base import Task as Task
    from fedglad.tasks.classification import Classification as Classification
    from fedglad.tasks.multilabel import MultiLabel as MultiLabel
    from fedglad.tasks.regression import Regression as Regression
    from fedglad.tasks.segmentation import Segmentation as Segmentation
    from fedglad.tasks.tokens import CausalLM as CausalLM
    from fedglad.tasks.tokens import NextToken as NextToken

__getattr__, __dir__ = lazily(__name__)

REGISTRY = {
    "classification": "fedglad.tasks.classification:Classification",
    "multilabel": "fedglad.tasks.multilabel:MultiLabel",
    "regression": "fedglad.tasks.regression:Regression",
    "segmentation": "fedglad.tasks.segmentation:Segmentation",
    "next-token": "fedglad.tasks.tokens:NextToken",
    "causal-lm": "fedglad.tasks.tokens:CausalLM",
}
