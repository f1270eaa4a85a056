"""Controls: the run at a constant factor that an adaptive rule had on average.

What a rule gains over its control is not merely a better rate. A control is an ordinary run with
adapter.name=fixed; a file in its folder names the rules that it is the control of.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from fedglad.config.schema import Config
from fedglad.core.files import write_text
from fedglad.runs.folder import Run

FILE = "control.json"


def adaptive(config: Config) -> bool:
    """Whether its factor may change from round to round."""
    return config.sections["adapter"].adaptive


def mean_factor(folder: Path, config: Config) -> float:
    """The mean factor of a finished run per parameter and round: the groups by their sizes.

        s̄ = 1/T Σ_t Σ_G n_G s_G(t) / Σ_G n_G

    n_G is a group's number of parameters, T that of the rounds that stepped.
    """
    import torch

    from fedglad.core.layout import split

    with torch.random.fork_rng(devices=[]):
        layout = split(config.sections["model"].build())[0]
    per_tensor = dict(zip(layout.names, layout.numels, strict=True))
    groups = config.sections["adapter"].group(per_tensor)
    sizes = dict(zip(groups.labels, groups.sum(per_tensor), strict=True))
    found = [r["groups"] for r in Run(folder).rounds() if r["status"] == "stepped"]
    if not found:
        raise ValueError("no round of its rule stepped, so there is no mean factor")
    return fmean(weighted(told, sizes) for told in found)


def weighted(groups: Mapping[str, Mapping[str, float]], sizes: Mapping[str, float]) -> float:
    """A round's factors, as in its record, averaged by the groups' sizes.

    >>> weighted({"a": {"scale": 0.5}, "b": {"scale": 1.0}}, {"a": 3, "b": 1})
    0.625
    """
    total = math.fsum(sizes[name] * group["scale"] for name, group in groups.items())
    return total / math.fsum(sizes[name] for name in groups)


def at_constant(config: Config, factor: float) -> Config:
    """The same with this factor in every round."""
    return Config.of({**config.to_dict(), "adapter": {"name": "fixed", "value": factor}})


def mark(folder: Path, rule: Config, factor: float) -> None:
    """Notes in a control's folder whose it is."""
    own = {"adapter": rule.to_dict()["adapter"], "factor": factor}
    known = _read(folder)
    if own not in known:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FILE, json.dumps({"control_of": [*known, own]}, indent=2) + "\n")


def rules(folder: Path, adapter: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The [adapter] sections that a run with this one is the control of; mostly none.

    A folder that was overwritten by a run with another factor is a control no longer.
    """
    if adapter.get("name") != "fixed":
        return []
    return [found["adapter"] for found in _read(folder) if found["factor"] == adapter.get("value")]


def _read(folder: Path) -> list[dict[str, Any]]:
    """What the file says; a damaged one says nothing, and is written anew by the next sweep."""
    try:
        found: Any = json.loads((folder / FILE).read_text("utf-8"))["control_of"]
    except (ValueError, OSError, KeyError, TypeError):
        return []
    known = cast(list[Any], found) if isinstance(found, list) else []
    return [one for one in known if isinstance(one, dict) and {"adapter", "factor"} <= one.keys()]
