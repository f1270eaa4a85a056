"""The configuration: complete, exact to and from TOML, and plain about mistakes."""

import json
import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from fedglad.adapters import Adapter, Glad
from fedglad.config.schema import (
    DEFAULTS,
    FORMAT,
    KEEPING,
    PRESETS,
    REGISTRIES,
    YOUNGER_KEYS,
    Config,
    ConfigError,
    _line,
    _toml,
    find,
    load,
    parse_value,
    simulate,
)
from fedglad.runs import execute

ROWS = [(section, name) for section, registry in REGISTRIES.items() for name in registry]

PRIVATE = {
    **{f"{section}.name": "none" for section in ("adapter", "guard", "trust")},
    **{"weighting.name": "equal", "sampler.seed": "run"},
}
"""What privacy asks for beside it."""


def again(config: Config, folder: Path) -> Config:
    path = folder / "again.toml"
    path.write_text(config.to_toml())
    return load(path)[1]


def written(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def refused(overrides: dict[str, Any], source: str | Path = "digits") -> str:
    with pytest.raises(ConfigError) as error:
        load(source, overrides)
    return str(error.value)


# ------------------------------------------------------------------------------------ round trip


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_survives_the_way_through_toml(preset: str, tmp_path: Path):
    name, config = load(preset)
    assert name == preset
    assert again(config, tmp_path) == config
    assert again(config, tmp_path).hash() == config.hash()


def alone(section: str, name: str) -> Config:
    """A configuration with that row; what would be refused beside it is left out."""
    given = {f"{section}.name": name}
    if section == "filter":
        given["adapter.name"] = "none"
    if name == "central":
        given |= PRIVATE
    return load("digits", given)[1]


@pytest.mark.parametrize(("section", "name"), ROWS)
def test_every_row_of_every_section_survives_the_way_through_toml(
    section: str, name: str, tmp_path: Path
):
    config = alone(section, name)
    assert type(config.sections[section]) is find(section, name)
    assert config.to_dict()[section]["name"] == name
    assert again(config, tmp_path) == config


@pytest.mark.parametrize(("section", "name"), ROWS)
def test_the_file_is_complete(section: str, name: str):
    config = alone(section, name)
    tree = tomllib.loads(config.to_toml())
    first = ["rounds", "seed", "eval_every", "checkpoint_every"]
    assert list(tree) == [*first, *YOUNGER_KEYS, *REGISTRIES]
    settings = config.sections[section]
    wanted = {f.name for f in fields(settings) if getattr(settings, f.name) is not None}
    assert tree[section].keys() == {"name", *wanted}


@pytest.mark.parametrize(("section", "name"), ROWS)
def test_the_file_says_what_every_field_means(section: str, name: str):
    """Also of a field that has no value, in a line that is a comment: else nobody learns of it."""
    config = alone(section, name)
    block = config.to_toml().partition(f"[{section}]\n")[2].partition("\n\n")[0]
    lines = {line.lstrip("# ").split()[0]: line for line in block.splitlines()}
    unexplained = [
        f.name
        for f in fields(config.sections[section])
        if "#" not in lines.get(f.name, "").partition(f.name)[2]
    ]
    assert not unexplained


def test_no_comment_points_to_a_table_that_is_not_there():
    for section, name in ROWS:
        assert "table" not in alone(section, name).to_toml()
    adam = load("digits", {"server.name": "adam"})[1].to_toml()
    assert "# authors: FedGLAD's code, bias-corrected" in adam


def test_values_that_toml_writes_differently(tmp_path: Path):
    for key, value in {
        "adapter.gamma": math.inf,
        "client.eps": 1e-300,
        "client.lr": 1e22,
        "client.betas": (0.0, 0.5),
        "data.alpha": 0.1 + 0.2,
        "seed": 2**62,
        "sampler.seed": "run",
        "engine.workers": 3,
        "client.drop_last": True,
    }.items():
        config = load("digits", {key: value})[1]
        assert again(config, tmp_path) == config, key


@pytest.mark.parametrize(
    "script",
    [
        {"cohorts": {"3": [1, 2], "10": [4]}},
        {"largest_class": {"39": 7}},
        {"cohorts": {"0": [5]}, "largest_class": {"1": 2}},
        {},
    ],
)
def test_a_script_survives_the_way_through_toml(script: dict[str, Any], tmp_path: Path):
    given = {"sampler.name": "scripted", **{f"sampler.{k}": v for k, v in script.items()}}
    config = load("digits", given)[1]
    assert again(config, tmp_path) == config


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # all that TOML can hold
VALUES = st.recursive(
    TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


@given(VALUES)
@example('\x7f \x00\x1f\t\r\n "\\ \\ud83d é \u2028 \uffff 😀 \U0010ffff')
@example({"": "", "a.b": {"😀\x7f": ["\x7f"]}})
def test_every_text_is_read_back_from_toml(value: Any):
    line = _line("x", value, "what it means\nin two lines\x7f")
    assert tomllib.loads(f"[section]\n{line}\ny = 1\n") == {"section": {"x": value, "y": 1}}


@given(st.text(st.characters(max_codepoint=126)), st.text(st.characters(max_codepoint=0xD7FF)))
def test_what_json_writes_as_toml_does_stays_as_it_was(ascii: str, plain: str):
    """The files of runs that are there are compared by their bytes."""
    for text in (ascii, plain.replace("\x7f", "")):
        assert _toml({text: [text, 1]}) == f"{{{json.dumps(text)} = [{json.dumps(text)}, 1]}}"


@dataclass(frozen=True)
class Named(Glad):
    """An adapter with a text and a key that ASCII has no letters for."""

    größe: Annotated[str, "a meaning\nof two lines"] = "groß 😀"


def test_a_run_whose_settings_hold_an_emoji_can_be_resumed(tmp_path: Path):
    _, config = load("digits", {"adapter.name": f"{__name__}:Named"})
    assert again(config, tmp_path) == config
    assert again(config, tmp_path).hash() == config.hash()


@pytest.mark.parametrize("key", [False, True])
def test_half_a_character_is_refused_before_anything_is_written(key: bool, tmp_path: Path):
    half = "data-\udcff"  # what the shell gives for a byte that is not UTF-8
    _, config = load("digits", {"adapter.name": f"{__name__}:Named", "adapter.größe": half})
    told = r"'data-\\udcff' cannot be written to a TOML file: '\\udcff' is no character but half"
    with pytest.raises(ConfigError, match=told):
        _toml({half: 1} if key else half)
    with pytest.raises(ConfigError, match=told):
        execute("digits", config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_designs_file_loads(tmp_path: Path):
    path = written(
        tmp_path,
        """
        rounds = 50
        seed = 1
        [data]
        name = "digits"
        clients = 100
        partition = "label-skew"
        alpha = 0.1
        seed = 0
        [model]
        name = "cnn"
        [client]
        name = "plain"
        optimizer = "sgdm"
        lr = 0.01
        batch_size = 64
        epochs = 5
        clip_norm = 1.0
        [sampler]
        name = "uniform"
        clients_per_round = 10
        seed = "round"
        [filter]
        name = "none"
        [weighting]
        name = "samples"
        [server]
        name = "sgd"
        lr = 1.0
        [adapter]
        name = "glad"
        gamma = 0.02
        beta = 0.9
        groups = "tensor"
        [engine]
        name = "local"
        workers = "auto"
        client_timeout = 0
        """,
    )
    name, config = load(path)
    assert name == "own"
    assert config.sections["data"].clients == 100


def test_an_empty_file_is_all_defaults(tmp_path: Path):
    config = load(written(tmp_path, ""))[1]
    assert {s: v["name"] for s, v in config.to_dict().items() if s in REGISTRIES} == DEFAULTS


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"round": 5}, "unknown key 'round': did you mean 'rounds'?"),
        ({"client.leraning_rate": 1}, "unknown key 'client.leraning_rate': choose from"),
        (
            {"client.batchsize": 1},
            "unknown key 'client.batchsize': did you mean 'client.batch_size'",
        ),
        ({"client.lrr": 1}, "unknown key 'client.lrr': did you mean 'client.lr'?"),
        ({"adapter.nam": "glad"}, "unknown key 'adapter.nam': did you mean 'adapter.name'?"),
        ({"adaptr.name": "glad"}, "unknown key 'adaptr.name': did you mean 'adapter.name'?"),
        ({"adapter.gama": 0.1}, "unknown key 'adapter.gama': did you mean 'adapter.gamma'?"),
        ({"adaptor.gamma": 0.1}, "unknown key 'adaptor.gamma': did you mean 'adapter.gamma'?"),
        ({"zzz.gamma": 0.1}, "unknown key 'zzz.gamma': choose from data, task, model, client"),
        ({"rounds.many": 1}, "unknown key 'rounds.many': did you mean 'rounds'?"),
        ({"adaptor": {}}, "unknown key 'adaptor': did you mean 'adapter'?"),
        ({"adapter.name": "gladd"}, "unknown adapter 'gladd': did you mean 'glad'?"),
        ({"adapter.name": "gladd"}, "(fedglad list adapters)"),
        ({"server.name": "adma"}, "unknown server 'adma': did you mean 'adam'?"),
        ({"server.name": "adma"}, "(fedglad list optimizers)"),
        ({"sampler.name": "unifrom"}, "unknown sampler 'unifrom': did you mean 'uniform'?"),
        ({"data.name": "digit"}, "(fedglad list datasets)"),
        ({"weighting.name": "sample"}, "(fedglad list weights)"),
        ({"model.name": "zzz"}, "unknown model 'zzz': choose from softmax, mlp, cnn, small-cnn"),
        ({"data.partition": "label-skw"}, "unknown partition 'label-skw': did you mean"),
        ({"model.name": "cnn", "model.hidden": [1]}, "unknown key 'model.hidden'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest(overrides: dict[str, Any], said: str):
    assert said in refused(overrides)


def test_an_unknown_preset():
    with pytest.raises(ConfigError, match=r"unknown preset 'digit': did you mean 'digits'\?"):
        load("digit")
    with pytest.raises(ConfigError, match=r"choose from digits, synthetic.*ends in .toml"):
        load("xyz")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"rounds": "many"}, "rounds = 'many': must be a whole number"),
        ({"rounds": 1.5}, "rounds = 1.5: must be a whole number"),
        ({"rounds": True}, "rounds = True: must be a whole number"),
        ({"rounds": 0}, "rounds = 0: must be 1 or more"),
        ({"eval_every": 0}, "eval_every = 0: must be 1 or more"),
        ({"checkpoint_every": -1}, "checkpoint_every = -1: must be 1 or more"),
        ({"eval_clients": -1}, "eval_clients = -1: must be 0 or more"),
        ({"eval_clients": "some"}, "eval_clients = 'some': must be a whole number, or 'all'"),
        ({"eval_clients": True}, "eval_clients = True: must be a whole number, or 'all'"),
        ({"eval_clients_every": 0}, "eval_clients_every = 0: must be 1 or more"),
        ({"stop_after": -1}, "stop_after = -1: must be 0 or more"),
        ({"stop_after": 2.0}, "stop_after = 2.0: must be a whole number"),
        ({"max_seconds": -0.5}, "max_seconds = -0.5: must be 0 or more"),
        ({"max_seconds": "60"}, "max_seconds = '60': must be a number"),
        ({"max_seconds": float("nan")}, "max_seconds = nan: must be a number"),
        ({"max_seconds": float("inf")}, "max_seconds = inf: must be finite"),
        ({"client.lr": "fast"}, "client.lr = 'fast': must be a number"),
        ({"client.lr": [0.1]}, "client.lr = [0.1]: must be a number"),
        ({"client.lr": -1}, "lr=-1.0"),
        ({"client.lr": math.nan}, "lr=nan"),
        ({"client.batch_size": 1.5}, "client.batch_size = 1.5: must be a whole number"),
        ({"client.batch_size": 0}, "batch_size=0): must be 1 or more"),
        ({"client.optimizer": "sgmd"}, "'sgmd': must be one of 'sgd', 'sgdm', 'adam', 'adamw'"),
        ({"client.schedule": "cosine"}, "'cosine': must be one of 'constant', 'linear'"),
        ({"client.drop_last": "perhaps"}, "client.drop_last = 'perhaps': must be true or false"),
        ({"client.betas": [0.9]}, "client.betas = [0.9]: must be a longer list"),
        ({"client.betas": []}, "client.betas = []: must be a longer list"),
        ({"client.betas": [0.9, 0.9, 0.9]}, "client.betas = [0.9, 0.9, 0.9]: must be a shorter"),
        ({"client.betas": [0.9, "x"]}, "client.betas.1 = 'x': must be a number"),
        ({"client.betas": 0.9}, "client.betas = 0.9: must be a list"),
        ({"data.partition": 3}, "data.partition = 3: must be a text"),
        ({"sampler.seed": "x"}, "'x': must be a whole number or one of 'round', 'run'"),
        (
            {"sampler.name": "scripted", "sampler.cohorts": {"3": ["a"]}},
            "sampler.cohorts.3.0 = 'a': must be a whole number",
        ),
        ({"sampler.name": "scripted", "sampler.cohorts": 3}, "must be a table"),
        ({"data.clients": 0}, "Digits(clients=0)"),
        ({"data.clients": 5000}, "must be in 1 … 1437"),
        ({"adapter.groups": "layers"}, "'layers': must be one of 'tensor', 'layer', 'all'"),
        ({"adapter.gamma": -1}, "gamma=-1.0): must be 0 or more, inf for no bounds"),
        ({"engine.workers": 0}, "workers = 0: must be 1 or more, or 'auto'"),
        ({"engine.workers": "all"}, "engine.workers = 'all': must be a whole number or 'auto'"),
        ({"engine.client_timeout": -1}, "client_timeout = -1.0: must be 0 (never) or more"),
        ({"sampler.clients_per_round": 0}, "clients_per_round=0: must be 1 or more"),
        ({"adapter": "glad"}, "[adapter] is 'glad': it is a section, give it keys"),
        ({"filter.name": "krum"}, "leaves one update"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_the_way_out(overrides: dict[str, Any], said: str):
    found = refused(overrides)
    assert said in found
    assert "pydantic" not in found
    assert "\n" not in found


def test_a_section_that_is_a_value_is_refused_also_when_a_key_of_it_is_set(tmp_path: Path):
    path = written(tmp_path, 'adapter = "glad"')
    for overrides in ({}, {"adapter.gamma": 0.1}, {"adapter.name": "glad"}):
        assert "[adapter] is 'glad': it is a section, give it keys" in refused(overrides, path)


def test_broken_files(tmp_path: Path):
    assert "is not valid TOML" in refused({}, written(tmp_path, "rounds = = 3"))
    assert "there is no file" in refused({}, tmp_path / "absent.toml")
    assert "there is no file" in refused({}, tmp_path.with_suffix(".toml"))
    latin = tmp_path / "latin.toml"
    latin.write_bytes("# café\nrounds = 3".encode("latin-1"))
    assert "latin.toml" in refused({}, latin)


# ------------------------------------------------------------------------------------- overrides


def test_overrides_are_set_on_top():
    config = load("digits", {"client.lr": 0.5, "rounds": 3, "adapter": {"gamma": 0.1}})[1]
    assert config.rounds == 3
    assert config.sections["client"].lr == 0.5
    assert config.sections["client"].batch_size == 16  # the preset's
    assert config.sections["adapter"] == Glad(gamma=0.1)


def test_a_presets_table_is_never_changed_by_overrides():
    before = load("digits")[1]
    load("digits", {"client.lr": 0.5, "model.name": "mlp", "data.clients": 3})
    assert load("digits")[1] == before


def test_another_class_drops_the_fields_of_the_old_one(tmp_path: Path):
    path = written(tmp_path, '[adapter]\nname = "glad"\ngamma = 0.3\nmin_group = 7')
    assert load(path, {"adapter.name": "none"})[1].sections["adapter"] == Adapter()
    assert load(path, {"adapter.name": "glad"})[1].sections["adapter"].gamma == 0.3
    changed = load(path, {"adapter.name": "fixed", "adapter.value": 0.5})[1]
    assert changed.sections["adapter"].value == 0.5


def test_another_sampler_or_engine_keeps_the_fields_that_both_have(tmp_path: Path):
    """They mean the same in every class there; a server's rate does not."""
    sampler = load("digits", {"sampler.name": "scripted"})[1].sections["sampler"]
    assert sampler.clients_per_round == 5  # the preset's, and not Scripted's own 10
    text = (
        '[sampler]\nname = "scripted"\nclients_per_round = 4\nseed = "run"\ncohorts = {"1" = [2]}\n'
        '[engine]\nname = "local"\ndevice = "cpu"\nworkers = 3\n[server]\nname = "sgd"\nlr = 0.5'
    )
    other = {"sampler.name": "uniform", "engine.name": "serial", "server.name": "adam"}
    found = load(written(tmp_path, text), other)[1].to_dict()
    assert (found["sampler"]["clients_per_round"], found["sampler"]["seed"]) == (4, "run")
    assert "cohorts" not in found["sampler"]
    assert found["engine"] == {"name": "serial", "device": "cpu"}
    assert found["server"]["lr"] == 0.01
    changed = load("digits", {"sampler.name": "scripted", "sampler.clients_per_round": 7})[1]
    assert changed.sections["sampler"].clients_per_round == 7
    assert "did you mean 'scripted'?" in refused({"sampler.name": "script"})


def test_another_client_method_keeps_the_local_recipe():
    plain = load("digits")[1].to_dict()["client"]
    found = load("digits", {"client.name": "fedprox", "client.mu": 0.5})[1].to_dict()["client"]
    assert found == {**plain, "name": "fedprox", "mu": 0.5}
    # What only its own value goes with is not taken over.
    assert load("digits", {"client.name": "fedsgd"})[1].sections["client"].lr == 1.0
    deviation = load("digits", {"client.name": "vrl-sgd"})[1].sections["client"]
    assert (deviation.lr, deviation.epochs, deviation.clip_norm) == (plain["lr"], 5, 0)


@pytest.mark.parametrize("section", ["adapter", "client", "sampler", "data", "model"])
def test_naming_the_class_that_is_there_anyway_changes_nothing(section: str):
    """`--set client.name=plain` must not undo the preset's learning rate."""
    config = load("digits")[1]
    name = config.to_dict()[section]["name"]
    assert load("digits", {f"{section}.name": name})[1] == config


@pytest.mark.parametrize("name", ["glad", "fixed"])
def test_the_order_of_overrides_does_not_matter(name: str):
    pairs: list[tuple[str, Any]] = [("adapter.min_group", 7), ("adapter.name", name)]
    assert load("digits", dict(pairs))[1] == load("digits", dict(pairs[::-1]))[1]
    assert load("digits", dict(pairs))[1].sections["adapter"].min_group == 7


def test_a_config_takes_overrides_too():
    config = load("digits", {"engine.name": "serial", "rounds": 3, "client.epochs": 1})[1]
    assert len(list(simulate(config, {"rounds": 2}))) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("inf", math.inf),
        ("true", True),
        ("[0.9, 0.99]", [0.9, 0.99]),
        ('{"39" = [3, 14]}', {"39": [3, 14]}),
        ('"3"', "3"),
        ("glad", "glad"),
        ("label-skew", "label-skew"),
        ("package.module:Object", "package.module:Object"),
        ("", ""),
        ("a = b", "a = b"),
    ],
)
def test_values_on_the_command_line(text: str, value: Any):
    assert parse_value(text) == value


# ------------------------------------------------------------------------------------ own objects


@dataclass(frozen=True, kw_only=True)
class OwnAdapter(Adapter):
    """Half a step, always."""

    value: Annotated[float, "the factor"] = 0.5
    kind: str = 'a "quoted" name\\'

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value <= 0:
            raise ValueError(f"OwnAdapter(value={self.value!r}): must be positive")


@dataclass(frozen=True, kw_only=True)
class Needy(Adapter):
    """It has a field without a default."""

    rate: float


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A linear layer."""

    features: int = 64

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(self.features, 10))


class Undressed:
    """Not a dataclass."""


OWN = f"{OwnAdapter.__module__}:OwnAdapter"


def test_an_own_class_is_loaded_checked_and_written(tmp_path: Path):
    config = load("digits", {"adapter.name": OWN, "adapter.value": 0.25})[1]
    assert config.sections["adapter"] == OwnAdapter(value=0.25)
    assert f'name = "{OWN}"' in config.to_toml()
    assert "# the factor" in config.to_toml()
    assert again(config, tmp_path) == config
    assert "unknown key 'adapter.valu': did you mean 'adapter.value'?" in refused(
        {"adapter.name": OWN, "adapter.valu": 1}
    )
    assert "must be positive" in refused({"adapter.name": OWN, "adapter.value": -1})


def test_an_own_class_may_need_a_field():
    own = {"adapter.name": f"{Needy.__module__}:Needy"}
    assert refused(own) == "adapter.rate is missing: it has no default"
    assert load("digits", {**own, "adapter.rate": 2})[1].sections["adapter"] == Needy(rate=2.0)


def test_an_own_class_runs():
    given = {
        "model.name": f"{OwnModel.__module__}:OwnModel",
        "adapter.name": OWN,
        "engine.name": "serial",
        "rounds": 2,
    }
    assert [found.record.stepped for found in simulate("digits", given)] == [True, True]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:Thing", "cannot be loaded: No module named 'no_such_module'"),
        (f"{OwnAdapter.__module__}:Thing", "cannot be loaded: module"),
        (f"{OwnAdapter.__module__}:Undressed", "is not a dataclass"),
        ("math:pi", "is not a dataclass"),
        (":Thing", "cannot be loaded"),
        ("math:", "cannot be loaded"),
        ("..relative:Thing", "cannot be loaded"),
    ],
)
def test_an_own_class_that_cannot_be_loaded(name: str, said: str):
    found = refused({"adapter.name": name})
    assert found.startswith(f"adapter.name = {name!r}")
    assert said in found


def test_a_class_of_another_kind_is_refused():
    found = refused({"adapter.name": "fedglad.filters:Krum"})
    assert found == "a class of another kind: 'Krum' object has no attribute 'compares'"


# ------------------------------------------------------------------------------------------- hash


def other(value: Any) -> Any:
    """A value of the same type that is another one."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value / 2 + 0.001
        case tuple():
            return tuple(other(v) for v in value)
        case _:
            return None


def test_the_hash_ignores_the_engine_and_who_watches_and_nothing_else():
    config = load("digits")[1]
    for engine in ({"name": "serial"}, {"workers": 7}, {"client_timeout": 3.0}):
        assert load("digits", {"engine": engine})[1].hash() == config.hash()
    changed = {config.hash()}
    count = 1
    keeping = {"keep_checkpoints": 3, "keep_every": 7, "keep_best": True}  # checkpoints, no result
    assert keeping.keys() == KEEPING.keys()
    assert load("digits", keeping)[1].hash() == config.hash()
    others = [key for key in YOUNGER_KEYS if key not in KEEPING]
    for key in ("rounds", "seed", "eval_every", "checkpoint_every", *others):
        changed.add(load("digits", {key: getattr(config, key) + 1})[1].hash())
        count += 1
    for section, settings in config.sections.items():
        if section in ("engine", "trust"):
            continue
        for f in fields(settings):
            if (value := other(getattr(settings, f.name))) not in (None, ()):
                changed.add(load("digits", {f"{section}.{f.name}": value})[1].hash())
                count += 1
        for name in REGISTRIES[section]:
            if name != config.to_dict()[section]["name"]:
                given = {f"{section}.name": name}
                if section == "filter":
                    given["adapter.name"] = "fixed"  # and one more for them all, below
                if name == "central":
                    given |= PRIVATE
                changed.add(load("digits", given)[1].hash())
                count += 1
    assert count > 40
    assert len(changed) == count


def test_the_hash_has_the_format_of_results(monkeypatch: pytest.MonkeyPatch):
    """So that a run from before the streams changed is not taken for one of today."""
    before = load("digits")[1].hash()
    monkeypatch.setattr("fedglad.config.schema.FORMAT", FORMAT + 1)
    assert load("digits")[1].hash() != before


def test_the_hash_depends_on_values_not_on_how_they_are_written(tmp_path: Path):
    config = load("digits", {"client.lr": 1})[1]
    assert load("digits", {"client.lr": 1.0})[1].hash() == config.hash()
    assert load("digits", {"client.lr": "1"})[1].hash() == config.hash()
    assert len(config.hash()) == 10
    client = "[client]\nlr = 1.0\nbatch_size = 16\nepochs=5\nclip_norm=1.0"
    others = "[sampler]\nclients_per_round=5\n[average]\nname='ema'"
    path = written(tmp_path, f"rounds = 60\n{client}\n{others}")
    assert load(path)[1].hash() == config.hash()
    assert load("digits", {"client.lr": 1, "trust.name": "none"})[1].hash() == config.hash()
    acted = {"filter.name": "distrust"}  # on what is only watched otherwise
    strict = {**acted, "trust.opposed": 0.3}
    assert load("digits", strict)[1].hash() != load("digits", acted)[1].hash()
