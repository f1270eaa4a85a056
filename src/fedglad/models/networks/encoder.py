"""Encoders of Hugging Face's transformers as modules, loaded and with a head."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedglad.data import encoders
from fedglad.models.networks.texts import PIECE, TRAINED, Partial, ends, in_pieces

if TYPE_CHECKING:
    from fedglad.models.encoder import Encoder

QUERIES_AND_VALUES = (
    *("query", "value", "q_lin", "v_lin"),
    *("q_proj", "v_proj", "query_proj", "value_proj"),
)
"""What they are called in encoders: the matrices that get adapters, as in LoRA's paper."""


def build(settings: Encoder) -> nn.Module:
    """The model; what is not pretrained starts as transformers has it."""
    with _quiet():
        model = _packaged(settings) if settings.source in encoders.CACHED else _loaded(settings)
    if model.config.pad_token_id is None:
        raise ValueError(
            f"model.source = {settings.source!r} has no id that pads texts: choose an encoder"
        )
    return TextEncoder(model, mask=settings.mask, lora=settings.lora)


def _packaged(settings: Encoder) -> Any:
    """An encoder that installs as a package."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    files = encoders.open(settings.source)
    config = AutoConfig.for_model(**files.config, num_labels=settings.classes)
    if settings.weights == "random":
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    kind: Any = AutoModelForSequenceClassification._model_mapping[type(config)]  # pyright: ignore
    tensors = {name: torch.from_numpy(value.copy()) for name, value in files.tensors.items()}
    return kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32)


def _loaded(settings: Encoder) -> Any:
    """An encoder in a folder, or of the hub."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = Path(settings.source).expanduser()
    source = str(folder) if folder.is_dir() else settings.source
    safe: dict[str, Any] = {"trust_remote_code": False}  # else somebody's code may be run
    try:
        config = AutoConfig.from_pretrained(source, num_labels=settings.classes, **safe)
        if settings.weights == "random":
            return AutoModelForSequenceClassification.from_config(
                config, dtype=torch.float32, **safe
            )
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # of a head for other classes
            output_loading_info=True,
            **safe,
        )
        if lacking := _lacking(model, info):
            raise ValueError(f"its weights do not fit its config.json: {lacking}")
        return model
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split("\n")[0].split())
        if folder.is_dir():
            why = "is a folder without an encoder that can be used"
        else:
            why = "is no folder, and the hub did not give it ('minilm' installs as a package)"
        raise ValueError(f"model.source = {settings.source!r} {why}: {cause}") from error


class TextEncoder(Partial):
    """Takes ids (b, L), followed by the encoder's padding, and gives scores (b, classes)."""

    def __init__(self, model: Any, *, mask: bool, lora: int) -> None:
        super().__init__()
        self.mask = mask
        self.pad = int(model.config.pad_token_id)
        self.model: Any = _adapted(model, lora) if lora else model
        self.freeze()
        self.train()  # transformers gives it as for evaluation

    def forward(self, x: Tensor) -> Tensor:
        if not self.mask:
            return self._attended(x) if self.training else in_pieces(self._attended, x)
        lengths = ends(x, self.pad)
        if self.training and (x.device.type != "cpu" or lengths.amin() == lengths.amax()):
            return self._masked(x)  # pieces would save no time
        return in_pieces(self._masked, x, lengths, TRAINED if self.training else PIECE)

    def _attended(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x.long()).logits

    def _masked(self, x: Tensor) -> Tensor:
        lengths = ends(x, self.pad)
        x = x[:, : int(lengths.max())]
        text = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        return self.model(input_ids=x.long(), attention_mask=text).logits


def _adapted(model: Any, rank: int) -> Any:
    """The same with adapters of this rank; they, and what is not the encoder's, are trained."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ValueError("model.lora needs peft: pip install 'fedglad[text]'") from error
    head = [p for name, p in model.named_parameters() if not _inner(model, name)]
    modules = {name.rpartition(".")[2] for name, _ in model.base_model.named_modules()}
    targets = [name for name in QUERIES_AND_VALUES if name in modules] or None  # None: by peft
    try:
        settings = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
        model = inject_adapter_in_model(settings, model)
    except ValueError as error:
        kind = model.config.model_type
        raise ValueError(
            f"model.lora = {rank}: peft has no adapters for {kind}: {error}"
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    for parameter in head:
        parameter.requires_grad_(True)
    return model


def _lacking(model: Any, info: Mapping[str, Any]) -> str:
    """Which of the encoder's tensors the weights did not give; a pooler may be new."""
    misshaped = [key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]]
    absent = [name for name in info["missing_keys"] if ".pooler." not in name]
    names = [name for name in sorted({*misshaped, *absent}) if _inner(model, name)]
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)


def _inner(model: Any, name: str) -> bool:
    return name.startswith(f"{model.base_model_prefix}.")


@contextmanager
def _quiet() -> Generator[None]:
    """Without the warnings of transformers about a new head, and without its progress bars."""
    try:
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise ValueError("model encoder needs transformers: pip install 'fedglad[text]'") from error
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
