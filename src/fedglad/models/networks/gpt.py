"""GPT-2 of Hugging Face's transformers, built from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedglad.models.networks.texts import Partial

if TYPE_CHECKING:
    from fedglad.models.language import TinyGPT

ADAPTED = "c_attn"  # the matrix of queries, keys and values of a layer


class GPT(Partial):
    """Takes ids, or `input_ids` and `attention_mask` by name; gives what transformers gives."""

    def __init__(self, settings: TinyGPT) -> None:
        super().__init__()
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ModuleNotFoundError as error:
            raise ValueError(
                "model tiny-gpt needs transformers: pip install 'fedglad[text]'"
            ) from error
        config = GPT2Config(
            vocab_size=settings.vocabulary,
            n_positions=settings.length,
            n_layer=settings.layers,
            n_embd=settings.width,
            n_head=settings.heads,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
            use_cache=False,
        )
        model = GPT2LMHeadModel(config)
        self.model: Any = _adapted(model, settings.lora_rank) if settings.lora_rank else model
        self.freeze()
        self.train()  # transformers gives it as for evaluation

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.model(input_ids=input_ids.long(), attention_mask=attention_mask)


def _adapted(model: Any, rank: int) -> Any:
    """The same with adapters of this rank, of which alone a gradient is asked."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ValueError("model.lora_rank needs peft: pip install 'fedglad[text]'") from error
    settings = LoraConfig(r=rank, lora_alpha=rank, target_modules=[ADAPTED], fan_in_fan_out=True)
    model = inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model
