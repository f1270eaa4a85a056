"""The presets of texts: two rounds of each, on small stand-ins and, where there are, real files.

A stand-in is a file in the official form with little in it. From there on all is as for the real
ones: prepared by its recipe, in a cache, tokenised once, opened by the model.
"""

import csv
import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import cli

from fedglad.config.presets import PRESETS
from fedglad.config.schema import load
from fedglad.data import store
from fedglad.data.federation import Partitioned
from fedglad.data.sources import DataError, find, joined
from fedglad.data.sources.glove import of_lines
from fedglad.data.sources.minilm import TEXTS, WEIGHTS
from fedglad.models.encoder import Encoder
from fedglad.runs import Run
from fedglad.simulation.simulation import Simulation

PAPER = ("20news", "agnews")
NEWCOMERS = ("20news-minilm", "agnews-76k-minilm")
LSTM = ("20news-bilstm", "agnews-bilstm", "agnews-76k-bilstm")
CLASSES = {"20news": 20, "agnews": 4, "agnews-76k": 4}
TOPICS = [f"{a}{b}" for a in ("puck", "orbit", "wire", "stock") for b in "abcde"]
FILLER = ["report", "people", "today", "large", "paper", "again"]


def test_there_is_a_preset_for_everyone():
    assert {*PAPER, *NEWCOMERS, *LSTM} <= set(PRESETS)


# ------------------------------------------------------------------------------- the paper's values


@pytest.mark.parametrize("preset", PAPER)
def test_the_papers_recipe_for_distilbert(preset: str):
    parts = load(preset)[1].sections
    client, model, data = parts["client"], parts["model"], parts["data"]
    assert (client.optimizer, client.weight_decay, client.eps) == ("adamw", 0, 1e-8)
    assert (client.schedule, client.warmup, client.clip_norm) == ("linear", 0.06, 1.0)
    assert (client.shuffle, client.drop_last, client.epochs) == ("once", False, 1)
    assert client.lr == {"20news": 5e-5, "agnews": 2e-5}[preset]
    assert (data.length, data.tokenizer) == (128, "distilbert-base-uncased")
    assert model == Encoder(source="distilbert-base-uncased", classes=CLASSES[preset], mask=False)
    # 113 texts of 20 Newsgroups are 4 steps, 1,200 of AG News 38.
    assert (
        client.count({"20news": 113, "agnews": 1200}[preset]) == {"20news": 4, "agnews": 38}[preset]
    )


@pytest.mark.parametrize("preset", LSTM)
def test_the_papers_recipe_for_the_bilstm(preset: str):
    parts = load(preset)[1].sections
    client, model, data = parts["client"], parts["model"], parts["data"]
    assert (client.optimizer, client.lr, client.amsgrad) == ("adam", 1e-3, True)
    assert (client.weight_decay, client.clip_norm) == (1e-4, 0)
    assert (model.hidden, model.dropout) == (300, 0.2)
    assert (data.tokenizer, data.source, data.length) == ("words", model.data, 128)
    assert model.classes == CLASSES[model.data]
    assert model.vectors == ("glove-6b-100d-341k" if "76k" in preset else "glove-6b-300d")


RATES = {
    ("20news", "sgd"): (7.0, 6.0),
    ("20news", "momentum"): (2.0, 2.0),
    ("20news", "adam"): (3e-4, 3e-4),
    ("agnews", "sgd"): (1.0, 1.0),
    ("agnews", "momentum"): (0.5, 0.5),
    ("agnews", "adam"): (2e-4, 1e-4),
    ("20news-bilstm", "sgd"): (1.0,),
    ("20news-bilstm", "momentum"): (0.1,),
    ("agnews-bilstm", "sgd"): (0.5,),
    ("agnews-bilstm", "momentum"): (0.05,),
}
"""The paper's tables of tuned server rates: at α = 0.1, and at 1.0."""


@pytest.mark.parametrize(("preset", "server"), RATES)
def test_the_papers_server_rates(preset: str, server: str):
    for alpha, rate in zip((0.1, 1.0), RATES[preset, server], strict=False):
        given: dict[str, Any] = {"server.name": server, "data.alpha": alpha}
        assert load(preset, given)[1].sections["server"].lr == rate


@pytest.mark.parametrize(
    ("preset", "given", "message"),
    [
        (
            "20news-minilm",
            {"data.tokenizer": "words"},
            r"data.tokenizer = 'minilm', and not 'words",
        ),
        ("20news-bilstm", {"data.tokenizer": "minilm"}, r"data.tokenizer = 'words', and not 'mini"),
        ("20news-bilstm", {"model.data": "agnews"}, r"data.name = 'agnews', and not '20news'"),
        ("20news-bilstm", {"data.strip": True}, r"data.strip = False, and not True: set one"),
    ],
)
def test_tokens_of_another_kind_are_refused_before_anything_is_fetched(
    preset: str, given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setenv("FEDGLAD_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=message):
        load(preset, given)[1].plan()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------- stand-ins


def news(n: int, classes: int, seed: int) -> list[tuple[int, str]]:
    """Labelled texts of 1 to 20 words, of which some tell the label."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, str]] = []
    for k in range(n):
        said = [str(word) for word in rng.choice(FILLER, rng.integers(1, 15))]
        rows.append((k % classes, " ".join([*said, *[TOPICS[k % classes]] * 5])))
    return rows


def write_csv(path: Path, rows: list[tuple[int, str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows((label + 1, "A title", text) for label, text in rows)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOPICS, *FILLER, "a", "title"]
    made: Any = Tokenizer(WordPiece({w: k for k, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cache with a little of everything, and a folder with a small DistilBERT."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    home = tmp_path_factory.mktemp("stand-ins")
    before = os.environ.get(store.VARIABLE)
    os.environ[store.VARIABLE] = str(home / "cache")

    def put(name: str, raw: Path) -> None:
        recipe, made = find(name), home / "cache" / name
        made.mkdir(parents=True)
        store._put(made, made / f"v{recipe.format}", recipe.prepare(raw), {"source": "a test"})

    raw = {name: home / "raw" / name for name in ("20news", "agnews", "agnews-76k")}
    for folder in raw.values():
        folder.mkdir(parents=True)
    write_csv(raw["agnews"] / "train.csv", news(240, 4, 1))
    for name in ("agnews", "agnews-76k"):
        write_csv(raw[name] / "test.csv", news(60, 4, 2))
    lines = [json.dumps({"label": label, "text": text}) for label, text in news(200, 4, 3)]
    (raw["agnews-76k"] / "train_partial_76306.jsonl").write_text("\n".join(lines))
    posts: dict[str, Any] = {}
    for part, rows in (("train", news(400, 20, 4)), ("test", news(60, 20, 5))):
        content, at = joined(text for _, text in rows)
        labels = np.array([label for label, _ in rows], np.int64)
        posts |= {f"{part}_text": content, f"{part}_at": at, f"{part}_y": labels}
    np.savez(raw["20news"] / "20news-bydate.npz", **posts)
    for name, folder in raw.items():
        put(name, folder)
    rng = np.random.default_rng(6)
    for numbers in (100, 300):
        told = (
            f"{word} {' '.join(f'{x:.4f}' for x in rng.standard_normal(numbers))}"
            for word in ("the", *FILLER[:4], *TOPICS)
        )
        (folder := home / "raw" / f"{numbers}d").mkdir()
        (folder / f"glove.6B.{numbers}d.txt").write_text("\n".join(told))
        of_lines(folder)
        put(f"glove-6b-{numbers}d", folder)
    folder, made = home / "distilbert", tokenizer()
    size = made.get_vocab_size()
    torch.manual_seed(0)
    small = transformers.DistilBertConfig(
        vocab_size=size, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=128
    )
    transformers.AutoModel.from_config(small).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    mini = home / "mini"
    config = transformers.BertConfig(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    transformers.AutoModel.from_config(config).save_pretrained(mini)
    assert (mini / WEIGHTS).is_file()
    made.save(str(mini / "tokenizer.json"))
    (mini / "vocab.txt").write_text("\n".join(sorted(made.get_vocab(), key=made.token_to_id)))
    assert all((mini / name).is_file() for name in TEXTS)
    put("minilm", mini)
    yield {"distilbert-base-uncased": str(folder)}
    if before is None:
        del os.environ[store.VARIABLE]
    else:
        os.environ[store.VARIABLE] = before


@pytest.mark.slow
@pytest.mark.parametrize("preset", [*PAPER, *NEWCOMERS, *LSTM])
def test_two_rounds_on_stand_ins(preset: str, stand_ins: dict[str, str], tmp_path: Path):
    """By the command, with worker processes: learning, recorded, resumed to nothing more to do."""
    tree = PRESETS[preset].tree
    given = {
        "rounds": 2,
        "sampler.clients_per_round": 3,
        "data.clients": 8,
        "client.batch_size": 8,  # with one step alone, the warm-up's first, nothing would move
        "engine.workers": 2,
    }
    if (source := tree["model"].get("source")) in stand_ins:
        given |= {"model.source": stand_ins[source], "data.tokenizer": stand_ins[source]}
    settings = [text for key, value in given.items() for text in ("--set", f"{key}={value}")]
    told = cli("run", preset, *settings, "--out", tmp_path / "run", "--json")
    assert told.returncode == 0, told.stderr
    summary = json.loads(told.stdout)
    assert (summary["rounds"], summary["skipped"]) == (2, 0)
    assert 0 <= summary["final_accuracy"] <= 1
    rounds = Run(tmp_path / "run").rounds()
    plan = load(preset, given)[1].plan()
    names = [name for name, _ in plan.model.named_parameters()]
    for played in rounds:
        assert list(played["groups"]) == list(played["tensors"]) == names
        assert all("rejected" not in client for client in played["clients"])
        assert all(group["gsi"] >= 1 - 1e-6 for group in played["groups"].values())
    moved = [name for name in names if rounds[1]["tensors"][name]["mean_sq"] > 0]
    assert moved == names
    again = cli("run", preset, *settings, "--out", tmp_path / "run", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == summary


@pytest.mark.slow
def test_adapters_travel_alone(stand_ins: dict[str, str], tmp_path: Path):
    """LoRA by the command: resumed after its first round, only the adapters in its checkpoint."""
    given = ["--set", "model.lora=2", "--set", "data.clients=8", "--set", "checkpoint_every=1"]
    given += ["--set", "sampler.clients_per_round=3", "--set", "rounds=2"]
    told = cli("run", "20news-minilm", *given, "--out", tmp_path / "run", "--json")
    assert told.returncode == 0, told.stderr
    rounds = Run(tmp_path / "run").rounds()
    names = list(rounds[0]["tensors"])
    assert len([name for name in names if "lora_" in name]) == len(names) - 2 == 8
    from safetensors import safe_open

    [last] = sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))[-1:]
    with safe_open(last, "np") as saved:
        numbers = sum(saved.get_tensor(name).size for name in saved.keys())  # noqa: SIM118
    assert numbers < 10_000  # of 30,000 that the encoder has
    with safe_open(tmp_path / "run" / "model.safetensors", "np") as saved:
        assert {*saved.keys()} == {*names}  # the model to take along is what travels, too
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    whole = (tmp_path / "run" / "rounds.jsonl").read_text()
    newest = sorted((tmp_path / "run" / "checkpoints").glob("*"))[-2:]
    for path in (*newest, tmp_path / "run" / "summary.json"):
        path.unlink()
    again = cli("run", "20news-minilm", *given, "--out", tmp_path / "run", "--resume", "--json")
    assert again.returncode == 0, again.stderr
    assert without_times(whole) == without_times((tmp_path / "run" / "rounds.jsonl").read_text())
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model
    # One that was begun before batches were trained in pieces would go on to other bits.
    (tmp_path / "run" / "summary.json").unlink()
    for path in (tmp_path / "run" / "checkpoints").glob("*.json"):
        state = json.loads(path.read_text())
        assert state.pop("arithmetic") == 2
        del state["crc"]  # there was none at that time
        path.write_text(json.dumps(state))
    refused = cli("run", "20news-minilm", *given, "--out", tmp_path / "run", "--resume", "--json")
    assert refused.returncode != 0
    assert "another order" in " ".join(refused.stderr.split())


def without_times(text: str) -> list[dict[str, Any]]:
    rounds = [json.loads(line) for line in text.splitlines()]
    times = ("seconds", "crc", "after")  # checksums are of the seconds, too
    return [{k: v for k, v in played.items() if k not in times} for played in rounds]


# ------------------------------------------------------------------------------------ the real ones

REAL = {
    "20news-minilm": ("20news", "minilm"),
    "agnews-76k-minilm": ("agnews-76k", "minilm"),
    "20news-bilstm": ("20news", "glove-6b-100d-341k"),
    "agnews-76k-bilstm": ("agnews-76k", "glove-6b-100d-341k"),
}
"""What can be had without a model hub, and what it needs."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", REAL)
def test_two_rounds_on_real_texts(preset: str):
    """A few steps of two clients, tested on a hundred texts."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in REAL[preset]:
        try:
            store.get(name)
        except DataError as reason:
            pytest.skip(f"{name} cannot be had here: {reason}")
    given: dict[str, Any] = {
        "rounds": 2,
        "sampler.clients_per_round": 2,
        "client.steps": 2,
        "client.batch_size": 4,
        "engine.name": "serial",
        **({"model.vectors": "glove-6b-100d-341k"} if preset.endswith("bilstm") else {}),
    }
    config = load(preset, given)[1]
    whole = config.load_data()
    assert isinstance(whole, Partitioned)
    assert (whole.x.dtype, whole.x.shape[1]) == (torch.int32, 128)
    assert whole.classes == CLASSES[REAL[preset][0]]
    plan = config.plan()
    rows = np.split(whole.rows.numpy(), whole.bounds[1:-1])
    few = Partitioned(whole.x, whole.y, whole.test_x[:100], whole.test_y[:100], rows)
    with closing(Simulation(replace(plan, data=few))) as simulation:
        rounds = list(simulation.rounds())
    assert len(rounds) == 2
    for played in rounds:
        assert played.record.stepped
        assert not played.record.rejected
        assert played.test_loss is not None
        assert np.isfinite(played.test_loss)
