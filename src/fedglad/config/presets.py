"""Configurations that come with the library, by name: `presets.toml` has them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Preset:
    """What is not the default, as a TOML file would say it.

    >>> PRESETS["mnist"].tree["rounds"], PRESETS["mnist"].tree["model"]
    (50, {'name': 'cnn'})
    """

    about: str
    tree: Mapping[str, Any]
    server_lr: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """The tuned rate of each server optimizer, by data.alpha; the first is for all others."""
    toy: bool = False
    """For trying things out: fewer rounds of it are not called shortened."""


def _read() -> dict[str, Preset]:
    tables = tomllib.loads(files("fedglad.config").joinpath("presets.toml").read_text("utf-8"))
    presets: dict[str, Preset] = {}
    for name, table in tables.items():
        if base := table.pop("like", None):  # it stands further up, and is complete
            table = tables[name] = _merged(tables[base], table)
        if "about" in table:
            tree = dict(table)
            about, toy, rates = tree.pop("about"), tree.pop("toy", False), tree.pop("server_lr", {})
            by_alpha = {k: {float(alpha): lr for alpha, lr in v.items()} for k, v in rates.items()}
            presets[name] = Preset(about, tree, by_alpha, toy)
    return presets


def _merged(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the table's keys on top, section by section."""
    sections = {k: _merged(base.get(k, {}), v) for k, v in table.items() if isinstance(v, dict)}
    return {**base, **table, **sections}


PRESETS = _read()


def shortened(settings: Mapping[str, Any]) -> str:
    """Of a run's dotted settings: "16 of 500 rounds" if a preset's run would have more; else "".

    A preset is known by its data set and model. Centralised, a round is an epoch.

    >>> shortened({"data.name": "mnist", "model.name": "cnn", "rounds": 2})
    '2 of 50 rounds'
    """
    rounds = settings.get("rounds")
    if not isinstance(rounds, int) or settings.get("data.partition") == "centralised":
        return ""
    for preset in PRESETS.values():
        known = {f"model.{key}": value for key, value in preset.tree["model"].items()}
        known["data.name"] = preset.tree["data"]["name"]
        if not preset.toy and all(settings.get(key) == value for key, value in known.items()):
            whole = preset.tree["rounds"]
            return f"{rounds} of {whole} rounds" if rounds < whole else ""
    return ""
