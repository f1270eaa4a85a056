"""The steps of local optimizers, in place on flat vectors or on matrices of a row a client."""

import math

import torch
from torch import Tensor

from fedglad.clients.method import Plain

LONG, SPAN = 1 << 22, 1 << 18  # vectors beyond the first are stepped by spans that caches hold

Slots = dict[str, Tensor]


def slot_names(client: Plain) -> tuple[str, ...]:
    """The vectors of the local optimizer's state: zeros at the start of every round."""
    adam = ("m", "v", "most") if client.amsgrad else ("m", "v")
    return {"sgd": (), "sgdm": ("m",), "adam": adam, "adamw": adam}[client.optimizer]


def move(client: Plain, w: Tensor, grad: Tensor, slots: Slots, lr: float, step: int) -> None:
    """One step of the local optimizer in place; on vectors, or on matrices of a row a client."""
    if w.dim() == 1 and len(w) > LONG and w.device.type == "cpu":
        spans = (vector.split(SPAN) for vector in (w, grad, *slots.values()))
        for part, g, *states in zip(*spans, strict=True):
            _move(client, part, g, dict(zip(slots, states, strict=True)), lr, step)
    else:
        _move(client, w, grad, slots, lr, step)


def _move(client: Plain, w: Tensor, grad: Tensor, slots: Slots, lr: float, step: int) -> None:
    decoupled = client.optimizer == "adamw"
    if client.weight_decay and decoupled:
        w.mul_(1 - lr * client.weight_decay)
    elif client.weight_decay:
        grad.add_(w, alpha=client.weight_decay)
    if client.optimizer == "sgd":
        w.sub_(grad, alpha=lr)
    elif client.optimizer == "sgdm":
        w.sub_(slots["m"].mul_(client.momentum).add_(grad), alpha=lr)
    else:
        (beta1, beta2), m, v = client.betas, slots["m"], slots["v"]
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if client.amsgrad:  # Reddi et al. 2018, arXiv:1904.09237
            v = torch.maximum(slots["most"], v, out=slots["most"])
        root = v.sqrt().div_(math.sqrt(1 - beta2 ** (step + 1))).add_(client.eps)
        w.addcdiv_(m, root, value=-lr / (1 - beta1 ** (step + 1)))
