"""Steps of local training against the raw loop, one thread: `make bench BENCH=steps`.

Batches of 64 random images, or of 10 texts of 80 random characters; SGD with momentum 0.9,
clipping at 1. The raw loop is the same network as one writes it (torch's modules in their own
layout, ReLU before the pooling; of a GPT, transformers' with peft's adapters),
`torch.optim.SGD(foreach=True)` and `clip_grad_norm_`; ours is the client's round that every engine
calls, with its parameters in one vector.

    python benchmarks/steps.py [--rounds 2] [--repeats 5] [--quick] [--profile] [--memory]

`--rounds` counts local steps. `--profile` says where the time of one of our steps goes. `--memory`
compares fresh processes that keep freed memory, as those that train do, with others: our step
and a test of 1,000 images at once; medians of the processor's time, and page faults.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from _shared import best, load, machine, options, table
from compute import usual_cnn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils import clip_grad_norm_
from torch.profiler import profile

from fedglad.clients.method import Plain
from fedglad.clients.workbench import Workbench
from fedglad.core import malloc
from fedglad.models.cnn import FedOptCNN
from fedglad.models.language import CharLSTM, TinyGPT
from fedglad.models.resnet import ResNet56, ResNet56Basic, ResNet56GroupNorm

BATCH, LR, CLIP = 64, 0.01, 1.0
TEXTS, LENGTH, IDS = 10, 80, 81  # of a batch, of a text, in the vocabulary
Loss = Callable[[Any, Tensor], Tensor]
Norm = Callable[[int], nn.Module]


class Residual(nn.Module):
    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.relu = branch, shortcut, nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.branch(x) + self.shortcut(x))


class Pad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, x.shape[1]))


def conv(fan_in: int, fan_out: int, kernel: int, norm: Norm, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(fan_in, fan_out, kernel, stride, kernel // 2, bias=False),
        norm(fan_out),
    ]


def usual_resnet(blocks: int, norm: Norm, *, basic: bool = False) -> nn.Module:
    layers = [*conv(3, 16, 3, norm), nn.ReLU(inplace=True)]
    fan_in = 16
    for planes in (16, 32, 64):
        for k in range(blocks):
            stride = 2 if planes > 16 and not k else 1
            shortcut: nn.Module = nn.Identity()
            if basic:
                fan_out = planes
                branch = [*conv(fan_in, planes, 3, norm, stride), nn.ReLU(inplace=True)]
                branch += conv(planes, planes, 3, norm)
                if stride == 2:
                    shortcut = Pad()
            else:
                fan_out = 4 * planes
                branch = [*conv(fan_in, planes, 1, norm), nn.ReLU(inplace=True)]
                branch += [*conv(planes, planes, 3, norm, stride), nn.ReLU(inplace=True)]
                branch += conv(planes, fan_out, 1, norm)
                if not k:
                    shortcut = nn.Sequential(*conv(fan_in, fan_out, 1, norm, stride))
            layers.append(Residual(nn.Sequential(*branch), shortcut))
            fan_in = fan_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, 10))


class UsualLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.dense = nn.Linear(256, IDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.lstm(self.embedding(x))[0])


def usual_gpt() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=IDS,
        n_positions=LENGTH,
        n_layer=2,
        n_embd=64,
        n_head=4,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
        use_cache=False,
    )
    adapters = LoraConfig(r=4, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(GPT2LMHeadModel(config), adapters).train()  # pyright: ignore


def next_ids(given: Any, y: Tensor) -> Tensor:
    """The loss of the next id at each position."""
    scores = given if isinstance(given, Tensor) else given.logits
    return cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-100)


MODELS: dict[str, tuple[Any, Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (FedOptCNN(), usual_cnn, (1, 28, 28)),
    "resnet56": (ResNet56(), lambda: usual_resnet(6, nn.BatchNorm2d), (3, 32, 32)),
    "resnet56-basic": (
        ResNet56Basic(),
        lambda: usual_resnet(9, nn.BatchNorm2d, basic=True),
        (3, 32, 32),
    ),
    "resnet56-gn": (
        ResNet56GroupNorm(),
        lambda: usual_resnet(6, lambda planes: nn.GroupNorm(2, planes)),
        (3, 32, 32),
    ),
}


@dataclass(frozen=True)
class Work:
    """What is trained on: batches of one size, and a loss."""

    x: Tensor
    y: Tensor
    steps: int
    batch: int = BATCH
    loss: Loss = cross_entropy


def raw_loop(model: nn.Module, work: Work) -> Callable[[], None]:
    def run() -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=LR, momentum=0.9, foreach=True)
        for batch in torch.randperm(len(work.y)).split(work.batch)[: work.steps]:
            optimizer.zero_grad()
            work.loss(model(work.x[batch]), work.y[batch]).backward()
            clip_grad_norm_(trained, CLIP)
            optimizer.step()

    return run


def our_loop(model: nn.Module, work: Work) -> Callable[[], Any]:
    bench = Workbench(model, loss=work.loss)
    theta, rng = bench.w.clone(), np.random.default_rng(0)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    client = Plain(lr=LR, batch_size=work.batch, clip_norm=CLIP, steps=work.steps)
    return lambda: bench.train(client, theta, buffers, work.x, work.y, rng)


def our_test(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    def run() -> None:
        with torch.inference_mode():
            model.eval()(x)

    return run


def share(run: Callable[[], Any]) -> None:
    """Where the time of one run goes, by torch's own names of its operations."""
    with profile() as found:
        run()
    events = [e for e in found.key_averages() if e.self_cpu_time_total > 0]
    total = sum(e.self_cpu_time_total for e in events)
    first = sorted(events, key=lambda e: -e.self_cpu_time_total)[:12]
    rows = [(e.key, e.count, f"{e.self_cpu_time_total / total:.1%}") for e in first]
    table(("operation", "calls", "of the time"), rows)


def images(n: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator)
    return x, torch.randint(10, (n,), generator=generator)


def texts(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, IDS, (n, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def rivals(steps: int) -> Iterator[tuple[str, nn.Module, nn.Module, Work]]:
    """Our model, the usual one, and what both train on."""
    for name, (settings, usual, shape) in MODELS.items():
        n = steps * (5 if name == "cnn" else 1)  # which takes a tenth of the time
        yield name, settings.build(), usual(), Work(*images(n * BATCH, shape), n)
    n = 5 * steps
    work = Work(*texts(n * TEXTS), n, TEXTS, next_ids)
    yield "char-lstm", CharLSTM().build(), UsualLSTM(), work
    yield "tiny-gpt, LoRA", TinyGPT(lora_rank=4).build(), usual_gpt(), work


def alone(name: str, steps: int, *, keep: bool) -> None:
    """One step or test after the other in this process, which is a fresh one; prints JSON."""
    if keep:
        malloc.keep()
    what, _, kind = name.partition(" ")
    settings, _, shape = MODELS[what]
    model = settings.build()
    run = our_loop(model, Work(*images(BATCH, shape), 1))
    if kind == "test":
        run = our_test(model, images(1000, shape)[0])
    seconds, faults = list[float](), list[int]()
    for _ in range(3 + steps):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
        run()
        seconds.append(time.process_time() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(json.dumps([median(seconds[3:]), median(faults[3:])]))


def memory(steps: int, repeats: int) -> None:
    rows: list[tuple[str, ...]] = []
    for name in ("cnn step", "cnn test", "resnet56 step", "resnet56 test"):
        n = steps * (5 if name == "cnn step" else 1)
        told: dict[str, list[list[float]]] = {"given back": [], "kept": []}
        for _ in range(repeats):
            for way, found in told.items():
                command = [sys.executable, __file__, "--alone", name, "--rounds", str(n)]
                command += ["--keep"] if way == "kept" else []
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append(json.loads(done.stdout))
        for way, found in told.items():
            seconds, faults = (median(column) for column in zip(*found, strict=True))
            rows.append((name, way, f"{1000 * seconds:.0f}", f"{faults:,.0f}", load().split()[0]))
    table(("what", "freed memory is", "ms", "page faults", "load"), rows)


def main() -> None:
    parser = options("Steps of local training against the raw loop", rounds=2)
    parser.add_argument("--profile", action="store_true", help="where the time of ours goes")
    parser.add_argument("--memory", action="store_true", help="what keeping freed memory gains")
    parser.add_argument("--alone", help="a model and step or test, for --memory")
    parser.add_argument("--keep", action="store_true", help="freed memory, for --alone")
    chosen = parser.parse_args()
    steps, repeats = (1, 2) if chosen.quick else (chosen.rounds, chosen.repeats)
    torch.set_num_threads(1)
    if chosen.alone:
        alone(chosen.alone, chosen.rounds, keep=chosen.keep)
        return
    print(f"{machine()}; one thread; load {load()}")
    if chosen.memory:
        memory(steps, repeats)
        return
    rows: list[tuple[str, ...]] = []
    for name, ours, theirs, work in rivals(steps):
        sizes = [
            sum(p.numel() for p in model.parameters() if p.requires_grad)
            for model in (ours, theirs)
        ]
        assert sizes[0] == sizes[1], sizes
        runs = {"raw": raw_loop(theirs, work), "ours": our_loop(ours, work)}
        for run in runs.values():
            run()
        seconds = best(runs, repeats)
        raw, own = (work.steps * work.batch / seconds[key] for key in ("raw", "ours"))
        rows.append((name, f"{raw:,.0f}", f"{own:,.0f}", f"{own / raw:.2f}", load().split()[0]))
        if chosen.profile:
            print(f"\n{name}, one of our steps:")
            share(our_loop(ours, replace(work, steps=1)))
    table(("model", "raw loop, samples/s", "ours, samples/s", "× raw loop", "load"), rows)
    print(f"\nbest of {repeats}, in turn, {steps} steps each ({5 * steps} of the cnn and of texts)")


if __name__ == "__main__":
    main()
