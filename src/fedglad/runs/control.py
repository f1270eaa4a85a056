"""Controls: the run at a constant factor that an adaptive rule had on average.

What a rule gains over its control is not merely a better rate. A control is an ordinary run with
adapter.name=fixed; a file in its folder names the rules that it is the control of.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from fedglad.config.schema import Config
from fedglad.core.checksums import json_with_crc
from fedglad.core.files import write_text
from fedglad.runs.reader import CONTROL_FILE, Run, RunError


def mean_factor(folder: Path, config: Config) -> float:
    """The mean factor of a finished run per parameter and round: the groups by their sizes.

        s̄ = 1/T Σ_t Σ_G n_G s_G(t) / Σ_G n_G

    n_G is a group's number of parameters, T that of the rounds that stepped.
    """
    run = Run(folder)
    per_tensor = run.sizes() or built_sizes(config)
    groups = config.sections["adapter"].group(per_tensor)
    sizes = dict(zip(groups.labels, groups.sum(per_tensor), strict=True))
    lines = run.lines()
    if lines.damage:
        raise RunError(f"{folder}/{lines.damage}")
    stepped = [r["groups"] for r in run.rounds() if r["status"] == "stepped"]
    if not stepped:
        raise ValueError("no round of its rule stepped, so there is no mean factor")
    return fmean(_weighted(one, sizes) for one in stepped)


def built_sizes(config: Config) -> dict[str, int]:
    """The same as `Run.sizes` where there is no checkpoint: by building the model."""
    import torch

    from fedglad.core.layout import split

    config.require_loaded("model")
    with torch.random.fork_rng(devices=[]):
        layout = split(config.sections["model"].build())[0]
    return dict(zip(layout.names, layout.numels, strict=True))


def _weighted(groups: Mapping[str, Mapping[str, float]], sizes: Mapping[str, float]) -> float:
    """A round's factors, as in its record, averaged by the groups' sizes.

    >>> _weighted({"a": {"scale": 0.5}, "b": {"scale": 1.0}}, {"a": 3, "b": 1})
    0.625
    """
    total = math.fsum(sizes[name] * group["scale"] for name, group in groups.items())
    return total / math.fsum(sizes[name] for name in groups)


def mark(folder: Path, rule: Config, factor: float) -> None:
    """Notes in a control's folder whose it is."""
    control = {"adapter": rule.to_dict()["adapter"], "factor": factor}
    known = Run(folder).control_of()
    if control not in known:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"control_of": [*known, control]}, indent=2)
        write_text(folder / CONTROL_FILE, json_with_crc(f"{text}\n"))
