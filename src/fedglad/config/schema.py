"""The whole configuration of a run: one TOML file whose sections are the boxes of a round.

A section is `name` plus the fields of the dataclass of that name; nothing is declared twice. Types
are checked by pydantic from the dataclass, values by the dataclass itself.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import inspect
import json
import math
import re
import tomllib
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import date, time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_origin, get_type_hints

from fedglad import (
    adapters,
    averages,
    clients,
    data,
    estimators,
    filters,
    models,
    optimizers,
    privacy,
    samplers,
    tasks,
    transforms,
    trust,
    weights,
)
from fedglad.config.fit import agree
from fedglad.config.keys import flat
from fedglad.config.presets import PRESETS, Preset
from fedglad.core import guard, user_code
from fedglad.core.build import build, settings_of
from fedglad.core.given import KEY as FROM_PYTHON
from fedglad.core.given import Given
from fedglad.data.validation import held_out, validation_of, with_validation
from fedglad.models.weights import WEIGHTS, load_weights, with_weights
from fedglad.records import POSITIONS
from fedglad.server.compatibility import refuse, refuse_privacy
from fedglad.simulation import engines
from fedglad.tasks.classification import Classification

if TYPE_CHECKING:
    from torch import nn

    from fedglad.records import Round
    from fedglad.simulation.simulation import Parts

FORMAT = 2
"""Raised when the same configuration gives other results than before, so that no run that is there
is taken for one of today."""

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "data": data.REGISTRY,
    "task": tasks.REGISTRY,
    "model": models.REGISTRY,
    "client": clients.REGISTRY,
    "sampler": samplers.REGISTRY,
    "transform": transforms.REGISTRY,
    "filter": filters.REGISTRY,
    "weighting": weights.REGISTRY,
    "estimator": estimators.REGISTRY,
    "guard": guard.REGISTRY,
    "trust": trust.REGISTRY,
    "privacy": privacy.REGISTRY,
    "server": optimizers.REGISTRY,
    "adapter": adapters.REGISTRY,
    "average": averages.REGISTRY,
    "engine": engines.REGISTRY,
}

YOUNGER = {
    "task": Classification,
    "transform": transforms.NoTransform,
    "estimator": estimators.NoEstimator,
    "guard": guard.NoGuard,
    "trust": trust.NoTrust,
    "privacy": privacy.NoPrivacy,
    "average": averages.NoAverage,
}
"""Sections that files of before do not have, and what their runs had in the place of it."""

KEEPING = {"keep_checkpoints": 2, "keep_every": 0, "keep_best": False}
"""Keys that change no result, and so no run's hash: which checkpoints stay."""

YOUNGER_KEYS = {
    **{"eval_clients": 0, "eval_clients_every": 10, "stop_after": 0, "max_seconds": 0.0},
    **KEEPING,
}
"""Keys outside of all sections that files of before do not have; with these values nothing is other
than it was then, nor is a run's hash."""

LISTS = {
    **{"server": "optimizers", "data": "datasets", "weighting": "weights"},
    "privacy": "privacy",
}
"""What a section's registry is called in `fedglad list`, where it is not its plural."""

FACTORIES = {"model": "build", "data": "load_federation"}
"""Sections in which a user's class may be a plain function, and the method that it stands for."""

OWN = ("data.partition", "client.rounds_schedule", "server.schedule")
"""Keys beside those of the sections' classes that may name a user's class."""
OF_ANY_DATA = {"seed": 0, "validation": 0.0}
"""Keys that also a federation given from Python has: what its validation set is drawn by."""

KEEP = ("client", "sampler", "engine")
"""Sections in which a field means the same in every class, and so outlives another `name`, unless
the class has it in `fixed`."""


def younger() -> dict[str, Any]:
    """What an older file stands for in the sections and keys that it does not have."""
    made = {section: none() for section, none in YOUNGER.items()}
    sections = {
        section: {"name": _name_of(section, settings), **_values(settings)}
        for section, settings in made.items()
    }
    return json.loads(json.dumps({**YOUNGER_KEYS, **sections}))


class ConfigError(ValueError):
    """A configuration that cannot be run; the message says which key, the value and the way out."""


CONFIG_FILE = "config.toml"
"""The file's name in a run's folder, whose author may be anybody; files of other names are those
that users write."""


PLAIN = (str, int, float, list, tuple, type(None), date, time, Mapping, Given)
"""What TOML has as a value or a section, and what stands for an object already."""

GIVEN = """An object that was given from Python, which no file holds. The run goes on with the same
one, given again: fedglad.run(…, {section}=…, out=…, resume=True)."""
"""What config.toml says of it."""


@dataclass(frozen=True)
class Unloaded:
    """A section that names somebody's code, which was not loaded: its text, and nothing checked."""

    exact: ClassVar[bool] = False  # as far as anybody knows
    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A checked configuration: the settings of every box.

    >>> Config.of({"rounds": 3, "client": {"lr": 0.1}}).to_toml().splitlines()[0]
    'rounds = 3                      # how many rounds'
    """

    rounds: Annotated[int, "how many rounds"] = 50
    seed: Annotated[int, "of everything random but the partition and the cohorts"] = 1
    eval_every: Annotated[int, "test after every so many rounds, and after the last"] = 1
    checkpoint_every: Annotated[int, "save the state after every so many rounds"] = 10
    eval_clients: Annotated[
        int | Literal["all"],
        "clients whose own held-out samples are tested too: 0, a number drawn by the seed, all",
    ] = 0
    eval_clients_every: Annotated[int, "so often, in rounds, and after the last"] = 10
    stop_after: Annotated[
        int, "tested rounds without a better validation score that end the run; 0: none do"
    ] = 0
    max_seconds: Annotated[float, "all rounds together, then the run ends; 0: no limit"] = 0.0
    keep_checkpoints: Annotated[int, "checkpoints that stay: the last so many"] = 2
    keep_every: Annotated[int, "and those of every so many rounds; 0: none"] = 0
    keep_best: Annotated[bool, "and that of the best round by its score"] = False
    sections: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in _top_fields():
            value: Any = getattr(self, name)
            if (name, value) == ("eval_clients", "all"):
                continue
            if name == "keep_best":
                if not isinstance(value, bool):
                    raise ConfigError(f"{name} = {value!r}: must be true or false")
                continue
            number = (int, float) if name == "max_seconds" else int
            if not isinstance(value, number) or isinstance(value, bool) or value != value:
                kind = {"max_seconds": "a number", "eval_clients": "a whole number, or 'all'"}
                raise ConfigError(f"{name} = {value!r}: must be {kind.get(name, 'a whole number')}")
            least = 0 if YOUNGER_KEYS.get(name) == 0 else 1
            if value < least and name != "seed":
                raise ConfigError(f"{name} = {value!r}: must be {least} or more")
        if math.isinf(self.max_seconds):
            raise ConfigError("max_seconds = inf: must be finite; 0 is no limit")
        object.__setattr__(self, "max_seconds", float(self.max_seconds))

    @classmethod
    def of(cls, tree: Mapping[str, Any], trusted: Collection[str] | None = None) -> Config:
        """From a nested dict, as TOML gives it; what is not named has its default.

        Of the names of code outside of this library, "package.module:Object", those in `trusted`
        are loaded, by default all. A section with another one is kept as `Unloaded`.
        """
        top, tree = _top_fields(), _with_guard(tree)
        _known("", tree, [*top, *REGISTRIES])
        sections = {name: _section(name, tree.get(name, {}), trusted) for name in REGISTRIES}
        if getattr(sections["data"], "partition", None) == "centralised":
            # There is one client then, and it takes part in every round.
            for section, count in {"data": "clients", "sampler": "clients_per_round"}.items():
                if hasattr(sections[section], count):
                    sections[section] = replace(sections[section], **{count: 1})
        others = ("data", "task", "model", "guard", "trust", "privacy", "engine")
        parts = {name: _itself(part) for name, part in sections.items() if name not in others}
        try:
            if not any(isinstance(part, Unloaded | None) for part in parts.values()):
                refuse(**parts, engine=_itself(sections["engine"]))
                if isinstance(sections["privacy"], privacy.Central):
                    held_out = getattr(sections["data"], "validation", 0) or tree.get("stop_after")
                    judges = {name: _itself(sections[name]) for name in ("guard", "trust")}
                    others = {name: part for name, part in parts.items() if name != "average"}
                    refuse_privacy(**others, **judges, validates=bool(held_out))
        except (ValueError, AttributeError) as error:
            lost = "a class of another kind: " if isinstance(error, AttributeError) else ""
            raise ConfigError(f"{lost}{error}") from None
        return cls(**{name: tree[name] for name in top if name in tree}, sections=sections)

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value; what has none (its class decides) is left out."""
        tree: dict[str, Any] = {name: getattr(self, name) for name in _top_fields()}
        for name, settings in self.sections.items():
            given = {key: v for key, v in _values(settings).items() if v is not None}
            tree[name] = {"name": _name_of(name, settings), **given}
        return tree

    def to_tree(self) -> dict[str, Any]:
        """The same with the objects that were given themselves: `Config.of` makes it again."""
        given = {name: one for name, one in self.sections.items() if isinstance(one, Given)}
        return {**self.to_dict(), **given}

    def own_names(self, *, loaded: bool = True) -> dict[str, str]:
        """The keys that name code outside of this library, of sections that are loaded or not."""
        named = [(key, name, key.partition(".")[0]) for key, name in self._own_names()]
        return {
            key: name
            for key, name, section in named
            if isinstance(self.sections[section], Unloaded) != loaded
        }

    def _own_names(self) -> list[tuple[str, str]]:
        """Of all sections that are not an object, whose name says only what it was."""
        given = {name for name, one in self.sections.items() if isinstance(one, Given)}
        tree = {name: one for name, one in self.to_dict().items() if name not in given}
        return [*_own_names(tree).items()]

    def to_toml(self) -> str:
        """The complete file, every field with its meaning."""
        tree, texts = self.to_dict(), meanings(Config)
        lines = [_line(name, tree[name], texts.get(name)) for name in _top_fields()]
        for section, settings in self.sections.items():
            choices = ", ".join(REGISTRIES[section])
            lines += ["", f"[{section}]", _line("name", tree[section]["name"], choices)]
            if isinstance(settings, Unloaded):
                lines.append("# Code that was not loaded: the settings are as they were written.")
            if isinstance(settings, Given):
                lines += [f"# {line}" for line in GIVEN.format(section=section).splitlines()]
            texts = meanings(type(settings))
            for key, value in _values(settings).items():
                line = _line(key, value, texts.get(key))
                lines.append(line if value is not None else f"# {line}")
            if section == "model" and "weights" not in _values(settings):
                lines.append(f"# {_line('weights', None, WEIGHTS)}")
        return "\n".join(lines) + "\n"

    def plan(self, *, model: nn.Module | None = None, data: Any = None, task: Any = None) -> Parts:
        """What the configuration stands for; `model`, `data` and `task` take its own's place."""
        from fedglad.config.trial import check
        from fedglad.simulation.simulation import Parts
        from fedglad.tasks.base import as_task

        self.require_loaded()
        parts = {section: _itself(settings) for section, settings in self.sections.items()}
        model = parts["model"] if model is None and self._is_made("model") else model
        data = parts["data"] if data is None and self._is_made("data") else data
        name, settings = type(model).__name__, None
        if model is None:
            name, settings = _name_of("model", parts["model"]), parts["model"]
            if data is None:
                agree(settings, parts["data"])
            model = self.build_model()
        assert model is not None
        if known := getattr(parts["model"], "weights_checksum", ""):
            model = copy.deepcopy(model)  # it may be the user's own
            load_weights(model, parts["model"].weights, known)
        source = self.federation if data is None and self._can_be_opened() else None
        data = self.load_data() if data is None else data
        task = parts["task"] if task is None else as_task(task)
        loss = check(
            model, data, name, settings, task=task, batch_size=parts["client"].batch_size or 64
        )
        data = self._held_out(data)
        if self.stop_after and validation_of(data) is None:
            raise ConfigError(
                f"stop_after = {self.stop_after} needs a validation set to look at: set "
                "data.validation=0.1, or stop_after=0"
            )
        if self.stop_after and parts["client"].has_personal:
            raise ConfigError(
                f"stop_after = {self.stop_after} looks at the server's model, in which the "
                f"clients' personal parameters stay as they began: set stop_after=0"
            )
        return Parts(
            rounds=self.rounds,
            seed=self.seed,
            eval_every=self.eval_every,
            model=model,
            data=data,
            source=source,
            task=task,
            start_loss=loss,
            client=parts["client"].within(self.rounds),
            sampler=parts["sampler"],
            optimizer=parts["server"].within(self.rounds),
            adapter=parts["adapter"],
            filter=parts["filter"],
            weighting=parts["weighting"],
            guard=parts["guard"] if isinstance(parts["guard"], guard.Guard) else None,
            trust=parts["trust"] if isinstance(parts["trust"], trust.Trust) else None,
            estimator=_or_none(parts["estimator"], estimators.NoEstimator),
            average=_or_none(parts["average"], averages.NoAverage),
            transform=_or_none(parts["transform"], transforms.NoTransform),
            privacy=_or_none(parts["privacy"], privacy.NoPrivacy),
            engine=parts["engine"],
            arithmetic=getattr(settings, "arithmetic", 1),
            eval_clients=self.eval_clients,
            eval_clients_every=self.eval_clients_every,
            stop_after=self.stop_after,
            max_seconds=self.max_seconds,
        )

    def _is_made(self, section: str) -> bool:
        """Whether the section was given as a model or a federation, and not as settings of one."""
        thing = _itself(settings := self.sections[section])
        return isinstance(settings, Given) and not _makes(section, thing)

    def _can_be_opened(self) -> bool:
        """Whether another machine can open the data by the configuration alone."""
        own = {key.partition(".")[0] for key in self.own_names()}
        return not isinstance(self.sections["data"], Given) and "data" not in own

    def federation(self) -> Any:
        """The federation, without what its validation set takes."""
        return self._held_out(self.load_data())

    def _held_out(self, data: Any) -> Any:
        split = _values(self.sections["data"])
        seed, share = (split.get(name, none) for name, none in OF_ANY_DATA.items())
        return held_out(data, share, seed if isinstance(seed, int) else 0)

    def load_data(self) -> Any:
        """The federation that the data section stands for."""
        self.require_loaded("data")
        return _built("data", self.sections["data"], object)

    def build_model(self) -> nn.Module:
        """The module that the model section stands for, as a run begins with it.

        It is drawn by torch's generator, which is seeded for it. Of a module that was given it is
        that module itself.
        """
        import torch
        from torch import nn

        from fedglad.rng import stream

        self.require_loaded("model")
        if not self._is_made("model"):
            torch.manual_seed(int(stream(self.seed, "model").integers(2**63)))
        return _built("model", self.sections["model"], nn.Module)

    def require_loaded(self, *sections: str) -> None:
        """Raises ConfigError if one of these sections, by default of all, was not loaded."""
        for key, name in self.own_names(loaded=False).items():
            if not sections or key.partition(".")[0] in sections:
                raise ConfigError(
                    f"{key} = {name!r} is code that a run's folder names, so it was not loaded. "
                    "If you trust it: --trust-code, or load(…, trust_code=True) in Python"
                )
        for section in sections or self.sections:
            given = self.sections[section]
            if isinstance(given, Given) and given.thing is None:
                raise ConfigError(
                    f"[{section}] was an object that was given from Python, {given.about}, which "
                    "no file holds: go on from Python and give it again, "
                    f"fedglad.run(…, {section}=…, out=…, resume=True)"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as plain values: a class that was made of a user's function is in no module."""
        return Config.of, (self.to_dict(), tuple(self.own_names().values()))

    def as_begun(self, text: str) -> Config:
        """The same without the sections that the text of a run's older config.toml does not have.

        That is how the run was begun, and so it goes on.
        """
        none = {
            name: cls()
            for name, cls in YOUNGER.items()
            if f"[{name}]" not in text and name != "task"  # of which the default is the old one
        }
        return replace(self, sections={**self.sections, **none})

    def hash(self) -> str:
        """A short name of what determines the result.

        The engine is a part of it only if its bits differ; trust, if a filter acts on it.
        """
        tree: dict[str, Any] = {"format": FORMAT, **self.to_dict()}
        if getattr(_itself(self.sections["engine"]), "exact", True):
            del tree["engine"]
        for section, none in YOUNGER.items():
            if self.sections.get(section) == none():
                del tree[section]  # as it was before there was one
        if not getattr(_itself(self.sections.get("filter")), "needs_trust", False):
            tree.pop("trust", None)
        for name, default in YOUNGER_KEYS.items():
            if tree[name] == default or name in KEEPING:
                del tree[name]
        if getattr(_itself(self.sections.get("sampler")), "largest_cohort", 0) > POSITIONS:
            tree["blocks"] = POSITIONS  # they were not summed by blocks before there were any
        for section, settings in self.sections.items():
            if isinstance(settings, Given):
                tree[section][FROM_PYTHON] = settings.fingerprint  # however it shows itself
            for name, default in getattr(settings, "added", {}).items():
                if getattr(settings, name) == default:
                    tree[section].pop(name)
            for name in getattr(settings, "places", ()):  # of what a checksum stands for
                tree[section].pop(name, None)
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:10]


def load(
    source: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    trust_code: bool | Collection[str] | None = None,
) -> tuple[str, Config]:
    """A preset by name or a TOML file by path, with dotted keys set on top; its name and itself.

    A file may name code outside of this library, "package.module:Object". It is loaded, unless the
    file is the config.toml of a run's folder, which somebody else may have written: `trust_code`
    loads all of it, none, or only these names. What `overrides` name is always loaded. Among them
    an object may stand where the name of a section does: {"adapter": Glad(gamma=0.1)}.

    >>> name, config = load("mnist", {"adapter.name": "none"})
    >>> name, config.rounds, config.sections["adapter"]
    ('mnist', 50, Adapter(groups='tensor', min_group=1))
    >>> load("mnist", {"server.rl": 0.5})
    Traceback (most recent call last):
    ...
    fedglad.config.schema.ConfigError: unknown key 'server.rl': did you mean 'server.lr'?
    """
    path, overrides = Path(source), _with_objects(overrides or {})
    if preset := PRESETS.get(str(source)):
        name, tree = str(source), copy.deepcopy(dict(preset.tree))
    elif path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        try:
            name, tree = path.stem, tomllib.loads(path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
        if not tree and path.name == CONFIG_FILE:
            raise ConfigError(f"{path} is empty, and says nothing of the run")
    else:
        raise ConfigError(
            f"unknown preset {str(source)!r}{_closest(str(source), list(PRESETS))}"
            "  (fedglad list presets, or a path that ends in .toml)"
        )
    if trust_code is None:
        trust_code = preset is not None or path.name != CONFIG_FILE
    trusted = None if trust_code is True else {*(trust_code or ()), *_texts(overrides)}
    _override(tree, overrides, trusted)
    if preset:
        _tuned(tree, preset)
        _one_average(tree, overrides)
    return name, Config.of(tree, trusted)


def _texts(overrides: Mapping[str, Any]) -> Iterator[str]:
    """What was typed, and may be a name."""
    for value in overrides.values():
        inner = value.values() if isinstance(value, Mapping) else [value]
        yield from (text for text in inner if isinstance(text, str))


def _tuned(tree: dict[str, Any], preset: Preset) -> None:
    """Gives the server the rate that the preset knows for its optimizer, unless one is set."""
    server, data = tree.get("server", {}), tree.get("data", {})
    if isinstance(server, dict) and isinstance(data, dict):
        rates = preset.server_lr.get(str(server.get("name", DEFAULTS["server"])), {})
        if rates and "lr" not in server and data.get("partition") != "centralised":
            alpha = data.get("alpha")
            rate = rates.get(alpha) if isinstance(alpha, float | int) else None
            tree["server"] = {**server, "lr": rate or next(iter(rates.values()))}


def _one_average(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """A preset's average gives way to an optimizer that is one itself, unless it was asked for."""
    server = tree.get("server")
    cls = optimizers.REGISTRY.get(str(server.get("name"))) if isinstance(server, dict) else None
    if cls and cls.reads_out and not any(key.startswith("average") for key in overrides):
        tree.pop("average", None)


def _override(
    tree: dict[str, Any], overrides: Mapping[str, Any], trusted: Collection[str] | None
) -> None:
    """Sets dotted keys; names first, so that their order does not matter."""
    for key in sorted(overrides, key=_order):
        value = overrides[key]
        section, _, rest = key.partition(".")
        if not rest:
            tree[section] = value
            continue
        if section in _top_fields():
            raise ConfigError(f"unknown key {key!r}: did you mean {section!r}?")
        if section not in REGISTRIES:
            close = _closest(section, list(REGISTRIES), after=f".{rest}")
            raise ConfigError(f"unknown key {key!r}{close}")
        settings = tree.setdefault(section, {})
        if isinstance(settings, Given) and section == "data" and rest in OF_ANY_DATA:
            if rest == "validation" and not (isinstance(value, int | float) and 0 <= value < 1):
                raise ConfigError(f"{key} = {value!r}: must be in [0, 1)")
            tree[section] = replace(settings, values={**settings.values, rest: value})
            continue
        if isinstance(settings, Given):
            if rest != "name":
                raise ConfigError(
                    f"{key} = {value!r}: [{section}] is an object that was given from Python, "
                    f"{settings.about}: set {rest!r} where it is made"
                )
            settings = tree[section] = {}
        if not isinstance(settings, dict):
            raise ConfigError(f"[{section}] is {settings!r}: it is a section, give it keys")
        old = settings.get("name", DEFAULTS[section])
        if rest == "name" and old != value:
            # Another class: the old one's fields mean nothing to it, but for those in KEEP.
            new = find(section, str(value))
            kept = {f.name for f in fields(new)} if section in KEEP else set[str]()
            for cls in (new, *([find(section, str(old))] if _may_load(str(old), trusted) else [])):
                kept -= set(getattr(cls, "fixed", ()))
            for field_name in settings.keys() - kept:
                del settings[field_name]
        settings[rest] = value


def _order(key: str) -> tuple[bool, bool]:
    """Names first, and before them whole sections."""
    return key.partition(".")[0] != key, not key.endswith(".name")


def changed(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A configuration with dotted keys set on top; an object may stand where a name does.

    >>> changed(Config.of({}), {"rounds": 3, "adapter": adapters.Glad(gamma=0.1)}).rounds
    3
    """
    tree, overrides = config.to_tree(), _with_objects(overrides)
    trusted = {*config.own_names().values(), *_texts(overrides)}
    _override(tree, overrides, trusted)
    return Config.of(tree, trusted)


def _with_objects(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The same with what stands in a configuration for objects, each as a whole section."""
    made: dict[str, Any] = {}
    for key, value in overrides.items():
        section = key.removesuffix(".name")
        plain = isinstance(value, PLAIN)
        if plain or section not in REGISTRIES:
            made[key] = value
        else:
            made[section] = as_section(section, value)
    return made


def as_section(section: str, thing: Any) -> dict[str, Any] | Given:
    """What stands in a configuration for an object: its settings, if a file can hold all of it.

    That is a dataclass of this library, or of a module that can be imported, with plain values.
    Anything else is there as `Given`: a module, a federation, a class of a notebook.

    >>> as_section("adapter", adapters.Glad(gamma=0.1))["gamma"]
    0.1
    >>> as_section("task", lambda scores, y: (scores - y).abs().mean()).about
    'ByLoss(function=<function <lambda>>)'
    """
    from fedglad.tasks.base import as_task

    factory = FACTORIES.get(section, "")
    made = as_task(thing) if section == "task" else thing
    if inspect.isclass(thing) or (factory and inspect.isroutine(thing)):
        name = f"{thing.__module__}:{thing.__qualname__}"
        if not factory or is_dataclass(thing):
            raise ConfigError(
                f"[{section}] is the class {thing.__name__}: give an object, such as "
                f"{thing.__name__}()"
            )
        if _is_named(section, name, thing):
            return {"name": name}
        try:
            made = settings_of(thing, factory, name)()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"[{section}] {thing.__name__}() cannot be called: {error}") from None
    settings = _makes(section, made) if factory else is_dataclass(made)
    name = _name_of(section, made)
    values = {k: v for k, v in _values(made).items() if v is not None} if settings else {}
    if settings and _is_named(section, name, type(made)) and _same(section, name, values, made):
        return {"name": name, **values}
    return Given(name, {key: v for key, v in values.items() if _is_plain(v)}, made)


def _is_named(section: str, name: str, thing: Any) -> bool:
    """Whether another process finds this very class or function by the name."""
    if name in REGISTRIES[section]:
        return True
    module, _, attribute = name.partition(":")
    if module in ("__main__", "__mp_main__") or not attribute.isidentifier():
        return False
    try:
        return user_code.load(name) is thing
    except Exception:  # whatever importing it raises
        return False


def _same(section: str, name: str, values: Mapping[str, Any], thing: Any) -> bool:
    """Whether a file with these values gives an equal object."""
    if not all(map(_is_plain, values.values())):
        return False
    text = "\n".join(_line(key, value, None) for key, value in values.items())
    try:
        return _section(section, {"name": name, **tomllib.loads(text)}, None) == thing
    except ValueError:
        return False


def _is_plain(value: Any) -> bool:
    """Whether a file can hold a value."""
    try:
        return bool(_toml(value))
    except TypeError:
        return False


def _itself(settings: Any) -> Any:
    """The object of a section that was given as one; None if only its file is here."""
    return settings.thing if isinstance(settings, Given) else settings


def _makes(section: str, thing: Any) -> bool:
    """Whether an object is settings of a model or of a federation."""
    return is_dataclass(thing) and hasattr(thing, FACTORIES[section])


def simulate(
    config: str | Path | Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    task: Any = None,
    callbacks: Any = (),
) -> Iterator[Round]:
    """Runs a preset, a TOML file or a Config, and yields each round as it is done.

    `overrides` are dotted keys, {"adapter.name": "none"}; an object may stand where a name does,
    {"adapter": Mine()}. `model`, `data` and `task` take the place of the configuration's: a module;
    an object that has clients, size(k), client(k) -> (x, y) and test() -> (x, y); and one that has
    loss(model, batch) and metrics(model, batch). `callbacks` are called after each round, before it
    is yielded, and may end the run, as those of `fedglad.run`.

    >>> settings = {"rounds": 2, "client.epochs": 1, "sampler.clients_per_round": 3}
    >>> [len(round.cohort) for round in simulate("digits", settings)]
    [3, 3]
    """
    from fedglad.simulation.callbacks import Callbacks
    from fedglad.simulation.simulation import Simulation

    calls, overrides = Callbacks(callbacks), dict(overrides or {})
    if _makes("model", model):
        overrides["model"], model = model, None
    if _makes("data", data):
        overrides["data"], data = data, None
    if isinstance(config, Config):
        checked = changed(config, overrides)
    else:
        checked = load(config, overrides)[1]
    with closing(Simulation(checked.plan(model=model, data=data, task=task))) as simulation:
        for played in simulation.rounds():
            simulation.stopping.asked = calls.round_end(played, simulation.server)
            yield played


def parse_value(text: str) -> Any:
    """The value of `--set key=value`: TOML where it is, else the text itself.

    >>> [parse_value(text) for text in ("0.5", "[1, 2]", "true", "glad")]
    [0.5, [1, 2], True, 'glad']
    """
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def find(section: str, name: str) -> type:
    """The class of a registry name, or of "package.module:Object".

    >>> find("adapter", "glad")
    <class 'fedglad.adapters.glad.Glad'>
    """
    registry = REGISTRIES[section]
    target = registry.get(name, name)
    if isinstance(target, type):
        return target
    if ":" not in target:
        kind = LISTS.get(section, f"{section}s")
        raise ConfigError(
            f"unknown {section} {name!r}{_closest(name, list(registry))}  (fedglad list {kind})"
        )
    try:
        loaded = user_code.load(target)
        if section in FACTORIES and callable(loaded) and not is_dataclass(loaded):
            return settings_of(loaded, FACTORIES[section], name)
    except (ImportError, AttributeError, ValueError, TypeError, NameError) as error:
        raise ConfigError(f"{section}.name = {name!r} cannot be loaded: {error}") from None
    if not (isinstance(loaded, type) and is_dataclass(loaded)):
        function = " or a function" if section in FACTORIES else ""
        raise ConfigError(f"{section}.name = {name!r} is not a dataclass{function}")
    return loaded


DEFAULTS = {
    "data": "digits",
    "task": "classification",
    "model": "small-cnn",
    "client": "plain",
    "sampler": "uniform",
    "transform": "none",
    "filter": "none",
    "weighting": "samples",
    "estimator": "none",
    "guard": "adaptive",
    "trust": "none",
    "privacy": "none",
    "server": "sgd",
    "adapter": "glad",
    "average": "none",
    "engine": "local",
}


def _with_guard(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """A complete file that has no guard was written before there was one, and ran without."""
    if "guard" in tree or not tree.keys() >= REGISTRIES.keys() - YOUNGER.keys():
        return tree
    engine = tree["engine"]
    if isinstance(engine, Mapping):  # a run with Flower had its guard here
        engine = {k: v for k, v in engine.items() if k not in ("guard_norm", "guard_weight")}
    return {**tree, "engine": engine, "guard": {"name": "none"}}


def _own_names(tree: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a configuration that name code outside of this library, and these names."""
    keys = (*(f"{section}.name" for section in REGISTRIES), *OWN)
    given = {key: value for key, value in flat(tree).items() if key in keys}
    return {
        key: name for key, name in given.items() if isinstance(name, str) and user_code.is_own(name)
    }


def _may_load(name: str, trusted: Collection[str] | None) -> bool:
    return trusted is None or name in trusted or not user_code.is_own(name)


def _section(section: str, given: Any, trusted: Collection[str] | None) -> Any:
    if isinstance(given, Given):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"[{section}] is {given!r}: it is a section, give it keys")
    name = str(given.get("name", DEFAULTS[section]))
    values = {k: v for k, v in given.items() if k != "name"}
    if isinstance(said := values.pop(FROM_PYTHON, None), Mapping):
        return Given(name, values, said=said)
    if not all(_may_load(one, trusted) for one in _own_names({section: given}).values()):
        return Unloaded(name, json.loads(json.dumps(values, default=str)))  # TOML has dates, too
    cls = find(section, name)
    if section == "data" and "validation" in given:
        cls = with_validation(cls, name)
    if section == "model" and "weights" in given:
        cls = with_weights(cls, name)
    _known(section, given, [*(f.name for f in fields(cls)), "name"])
    try:
        return build(cls, values, section)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _or_none(settings: Any, none: type) -> Any:
    return None if isinstance(settings, none) else settings


def _built(section: str, settings: Any, kind: type) -> Any:
    """What the settings stand for; an error in a user's own code is reported with its place."""
    name, thing = _name_of(section, settings), _itself(settings)
    try:
        made = thing
        if not isinstance(settings, Given) or _makes(section, thing):
            made = getattr(thing, FACTORIES[section])()
    except Exception as error:
        if name in REGISTRIES[section]:
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"
        raise ConfigError(f"{section}.name = {name!r} failed: {cause}") from error
    if made is None or not isinstance(made, kind):
        raise ConfigError(
            f"{section}.name = {name!r}: the {section}'s function gave a {type(made).__name__}"
        )
    return made


def _known(section: str, given: Mapping[str, Any], valid: list[str]) -> None:
    for key in given:
        if key not in valid:
            before = f"{section}." if section else ""
            raise ConfigError(f"unknown key {before + key!r}{_closest(key, valid, before=before)}")


def _closest(word: str, valid: list[str], *, before: str = "", after: str = "") -> str:
    """The most similar word, as part of a key, or all of them."""
    longer = [name for name in valid if word and name.startswith(word)]
    if not (close := longer or difflib.get_close_matches(word, valid, n=1, cutoff=0.5)):
        return f": choose from {', '.join(valid)}"
    return f": did you mean {before + close[0] + after!r}?"


def _top_fields() -> list[str]:
    return [f.name for f in fields(Config) if f.name != "sections"]


def _values(settings: Any) -> Mapping[str, Any]:
    if isinstance(settings, Unloaded):
        return settings.values
    if isinstance(settings, Given):
        return {**settings.values, FROM_PYTHON: settings.to_dict()}
    return {f.name: getattr(settings, f.name) for f in fields(settings)}


def _name_of(section: str, settings: Any) -> str:
    if isinstance(settings, Unloaded | Given):
        return settings.name
    cls: type = type(settings)
    if source := getattr(cls, "own_function", ""):  # several may have one __qualname__
        return source
    for name, target in REGISTRIES[section].items():
        if target is cls or target == f"{cls.__module__}:{cls.__qualname__}":
            return name
    return f"{cls.__module__}:{cls.__qualname__}"


@lru_cache(256)
def meanings(cls: type) -> Mapping[str, str]:
    """The text beside each field's type: `lr: Annotated[float, "the server's rate"]`."""
    hints = get_type_hints(cls, include_extras=True).items()
    texts = {name: hint.__metadata__[0] for name, hint in hints if get_origin(hint) is Annotated}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _line(key: str, value: Any, meaning: str | None) -> str:
    text = f"{key if key.isascii() else _quoted(key)} = {'' if value is None else _toml(value)}"
    comment = re.sub(r"[\x00-\x08\x0a-\x1f\x7f]+", " ", meaning or "")  # TOML takes no other
    return f"{text:<32}# {comment}" if comment else text


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_toml(key)} = {_toml(v)}" for key, v in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """A text as TOML's basic string in ASCII. JSON writes DEL as it is and an emoji as two
    surrogates, which no reader of TOML takes."""

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        if 0xD800 <= code < 0xE000:
            raise ConfigError(
                f"{text!r} cannot be written to a TOML file: {match[0]!r} is no character but half "
                "of one. Was the setting given in another encoding than UTF-8?"
            )
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return re.sub(r"[^\x20-\x7e]", escaped, json.dumps(text, ensure_ascii=False))
