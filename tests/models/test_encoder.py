"""Encoders against transformers: forward and steps, LoRA, tied tensors; from a folder."""

import copy
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_support import packed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedglad import Glad, Server
from fedglad.clients.method import Plain
from fedglad.clients.workbench import Workbench
from fedglad.core.layout import split
from fedglad.data import encoders, store
from fedglad.data.sources import DataError
from fedglad.models.encoder import Encoder
from fedglad.models.networks.encoder import TextEncoder
from fedglad.models.networks.texts import PIECE, TRAINED
from fedglad.rng import stream

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

VOCABULARY, LENGTH, CLASSES = 60, 20, 4
SMALL = {
    "bert": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    },
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "roberta": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    },
}
"""Encoders of some thousand parameters; RoBERTa's padding is 1, and not 0."""
PAD = {"bert": 0, "distilbert": 0, "roberta": 1}
every_kind = pytest.mark.parametrize("kind", SMALL)


def small(kind: str) -> Any:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 40, "initializer_range": 0.2}
    return transformers.AutoConfig.for_model(kind, **sizes, **SMALL[kind])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Encoders without a head, as they are published."""
    transformers.utils.logging.disable_progress_bar()
    found: dict[str, Path] = {}
    for kind in SMALL:
        torch.manual_seed(1)
        found[kind] = tmp_path_factory.mktemp(kind)
        transformers.AutoModel.from_config(small(kind)).save_pretrained(found[kind])
    return found


def texts(kind: str = "bert", n: int = 13, longest: int = LENGTH) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest + 1, (n, 1), generator=rng)
    lengths[0] = longest
    x = torch.randint(2, VOCABULARY, (n, LENGTH), generator=rng)
    x = x.masked_fill(torch.arange(LENGTH) >= lengths, PAD[kind])
    return x.to(torch.int32), torch.randint(CLASSES, (n,), generator=rng)


def built(folder: Path, seed: int = 5, **settings: Any) -> TextEncoder:
    torch.manual_seed(seed)
    model = Encoder(source=str(folder), classes=CLASSES, **settings).build()
    assert isinstance(model, TextEncoder)
    return model


def still(model: Any) -> Any:
    """Without dropout, so that lengths can be compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def theirs(folder: Path, model: TextEncoder) -> Any:
    """The same in plain transformers."""
    other = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=CLASSES
    )
    other.load_state_dict(model.model.state_dict())
    return other


# --------------------------------------------------------------------------- against transformers


@every_kind
@pytest.mark.parametrize("mask", [False, True])
def test_scores_are_those_of_transformers(kind: str, mask: bool, folders: dict[str, Path]):
    model = built(folders[kind], mask=mask).eval()
    x, _ = texts(kind)
    other = theirs(folders[kind], model).eval()
    given = {"attention_mask": (x != PAD[kind]).long()} if mask else {}
    wanted = other(input_ids=x.long(), **given).logits
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-6)
    other_way = other(input_ids=x.long(), **({} if mask else masked(x, kind))).logits
    assert not torch.allclose(wanted, other_way, atol=1e-4)  # so it matters


def masked(x: Tensor, kind: str) -> dict[str, Tensor]:
    return {"attention_mask": (x != PAD[kind]).long()}


@every_kind
def test_the_encoders_weights_are_those_in_the_folder(kind: str, folders: dict[str, Path]):
    model = built(folders[kind])
    bare = transformers.AutoModel.from_pretrained(folders[kind]).state_dict()
    own = model.model.base_model.state_dict()
    pretrained = [name for name in own if "pooler" not in name]
    assert len(pretrained) > 30
    assert all(own[name].equal(bare[name]) for name in pretrained)
    other = built(folders[kind], weights="random").model.base_model.state_dict()
    weights = [name for name in pretrained if own[name].unique().numel() > 1]
    assert all(not own[name].equal(other[name]) for name in weights)


@every_kind
def test_the_start_depends_on_the_folder_and_torchs_generator(kind: str, folders: dict[str, Path]):
    def start(seed: int, **settings: Any) -> Tensor:
        model = built(folders[kind], seed, **settings)
        return nn.utils.parameters_to_vector(model.parameters())

    for settings in ({}, {"weights": "random"}, {"lora": 2}):
        assert start(1, **settings).equal(start(1, **settings))
        assert not start(1, **settings).equal(start(2, **settings))


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_a_clients_round_is_that_of_transformers(kind: str, mask: bool, folders: dict[str, Path]):
    """The paper's recipe, dropout and all: AdamW, clipping, and a rate that rises and falls."""
    model, (x, y) = built(folders[kind], mask=mask), texts(kind, 18)
    other = theirs(folders[kind], model).train()
    client = Plain(
        optimizer="adamw",
        lr=1e-2,
        batch_size=8,
        epochs=2,
        clip_norm=1.0,
        schedule="linear",
        warmup=0.5,
        shuffle="once",
    )
    bench = Workbench(copy.deepcopy(model))
    bench.train(client, bench.w.clone(), {}, x, y, stream(1, "c"), order=client.order(1, 0))
    torch.manual_seed(stream(1, "c").bit_generator.random_raw())
    optimizer = torch.optim.AdamW(other.parameters(), 1e-2, eps=1e-8, weight_decay=0)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 3, 6)
    order = client.order(1, 0)
    assert order is not None
    batches = np.split(order.permutation(18), [8, 16]) * 2
    for batch in batches:
        part = x[batch]
        longest = int((part != 0).sum(1).max())
        given = masked(part[:, :longest], kind) if mask else {}
        ids = part[:, :longest] if mask else part
        optimizer.zero_grad()
        cross_entropy(other(input_ids=ids.long(), **given).logits, y[batch]).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    wanted, start = other.state_dict(), model.state_dict()
    for name, value in bench.layout.views(bench.w).items():
        own = name.removeprefix("model.")
        # The keys' biases have no gradient but rounding, of which Adam takes the sign.
        if "key.bias" not in own and "k_lin.bias" not in own:
            torch.testing.assert_close(value, wanted[own], rtol=0, atol=1e-5)
        assert not value.equal(start[name]), name


# --------------------------------------------------------------------------------------- padding


@every_kind
def test_padding_that_is_left_out_changes_nothing(kind: str, folders: dict[str, Path]):
    """Scores and gradients of a batch in pieces, each cut to its longest text, and the whole."""
    model, (x, y) = still(built(folders[kind], mask=True)), texts(kind, longest=9)
    other = still(theirs(folders[kind], model)).train()
    found = model(x)
    wanted = other(input_ids=x.long(), **masked(x, kind)).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    cross_entropy(found, y).backward()
    cross_entropy(wanted, y).backward()
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name.removeprefix("model.")], rtol=0, atol=1e-5
        )
    shapes: list[tuple[int, ...]] = []
    model.model.base_model.embeddings.register_forward_hook(
        lambda module, given, out: shapes.append(tuple(out.shape[:2]))
    )
    model(x)
    lengths = sorted((x != PAD[kind]).sum(1).tolist())
    assert lengths[TRAINED - 1] < lengths[-1] == 9
    assert shapes == [(TRAINED, lengths[TRAINED - 1]), (len(x) - TRAINED, 9)]


def test_a_batch_of_one_length_is_one_piece(folders: dict[str, Path]):
    model, (x, _) = still(built(folders["bert"], mask=True)), texts("bert", longest=9)
    x[:, 9:] = PAD["bert"]
    x[:, :9] = x[:, :9].clamp_min(5)  # no text is shorter
    shapes: list[tuple[int, ...]] = []
    model.model.base_model.embeddings.register_forward_hook(
        lambda module, given, out: shapes.append(tuple(out.shape[:2]))
    )
    model(x)
    assert shapes == [(len(x), 9)]
    model.eval()(x.repeat(2 * PIECE, 1)[: 2 * PIECE])
    assert shapes[1:] == [(PIECE, 9)] * 2


def test_padding_that_is_attended_is_not_cut(folders: dict[str, Path]):
    model, (x, _) = built(folders["bert"]).eval(), texts(longest=9)
    assert not torch.allclose(model(x), model(x[:, :9]), atol=1e-4)
    shapes: list[tuple[int, ...]] = []
    model.model.base_model.embeddings.register_forward_hook(
        lambda module, given, out: shapes.append(tuple(out.shape[:2]))
    )
    many = x.repeat(2 * PIECE // 13 + 1, 1)
    model(many)
    assert shapes == [(PIECE, LENGTH)] * 2 + [(len(many) - 2 * PIECE, LENGTH)]


@pytest.mark.parametrize("mask", [False, True])
def test_many_texts_are_evaluated_in_pieces(mask: bool, folders: dict[str, Path]):
    model, (x, _) = built(folders["bert"], mask=mask).eval(), texts(n=2 * PIECE + 9)
    given = masked(x, "bert") if mask else {}
    wanted = theirs(folders["bert"], model).eval()(input_ids=x.long(), **given).logits
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------ LoRA


@every_kind
def test_only_adapters_and_head_are_in_the_layout(kind: str, folders: dict[str, Path]):
    model, whole = built(folders[kind], lora=3), built(folders[kind])
    layout, _, buffers = split(model)
    assert buffers == {}
    names = [name for name, _ in model.named_parameters()]
    assert names == list(model.state_dict()) == list(layout.names)
    adapters = [name for name in names if "lora_" in name]
    assert len(adapters) == 2 * 2 * 2  # two layers, queries and values, A and B
    head = [n for n, _ in whole.named_parameters() if not n.startswith(f"model.{PREFIX[kind]}.")]
    assert [name for name in names if name not in adapters] == head
    sizes = dict(zip(layout.names, layout.numels, strict=True))
    assert all(sizes[name] == 3 * 32 for name in adapters)
    assert len(model.constants) == len(list(whole.parameters())) - len(head)


PREFIX = {"bert": "bert", "distilbert": "distilbert", "roberta": "roberta"}


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_a_step_of_adapters_is_that_of_peft(kind: str, folders: dict[str, Path]):
    """Against the same model with everything in place, of which peft trains the adapters."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    other: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        folders[kind], num_labels=CLASSES
    )
    heads = [name for name, _ in other.named_children() if name not in ("dropout", PREFIX[kind])]
    settings = LoraConfig(
        task_type="SEQ_CLS",
        r=3,
        lora_alpha=3,
        target_modules={"bert": ["query", "value"], "distilbert": ["q_lin", "v_lin"]}[kind],
        modules_to_save=heads,
    )
    wrapped: Any = get_peft_model(other, settings).train()
    model, (x, y) = built(folders[kind], lora=3), texts(kind)
    own = {name.removeprefix("model."): p for name, p in model.named_parameters()}
    trained = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): p
        for name, p in wrapped.named_parameters()
        if p.requires_grad
    }
    assert trained.keys() == own.keys()
    with torch.no_grad():
        for name, parameter in own.items():  # B is zero at first, and A has no gradient then
            trained[name].copy_(parameter.normal_())
    client = Plain(optimizer="sgd", lr=0.1, batch_size=13)
    bench = Workbench(model)
    bench.train(client, bench.w.clone(), {}, x, y, stream(1, "c"))
    rng = stream(1, "c")
    torch.manual_seed(rng.bit_generator.random_raw())
    order = rng.permutation(13)
    cross_entropy(wrapped(input_ids=x[order].long()).logits, y[order]).backward()
    with torch.no_grad():
        for name, parameter in own.items():
            gradient = trained[name].grad
            assert gradient is not None
            assert gradient.abs().max() > 1e-5, name
            torch.testing.assert_close(
                parameter, trained[name] - 0.1 * gradient, rtol=1e-5, atol=1e-5
            )


def test_adapters_start_as_no_change(folders: dict[str, Path]):
    with_, without = built(folders["bert"], lora=3).eval(), built(folders["bert"]).eval()
    own = dict(with_.named_parameters())
    with torch.no_grad():
        for name in ("model.classifier.weight", "model.classifier.bias"):
            own[name].copy_(without.get_parameter(name))
    x, _ = texts()
    torch.testing.assert_close(with_(x), without(x), rtol=0, atol=1e-6)


def test_copies_share_what_is_constant(folders: dict[str, Path]):
    model, (x, _) = built(folders["bert"], lora=2).eval(), texts()
    twin = copy.deepcopy(model)
    ours, others = model.kept(), twin.kept()
    assert len(ours) > 30
    assert all(ours[name] is others[name] for name in ours)
    assert not any(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert twin(x).equal(model(x))
    again = pickle.loads(pickle.dumps(model))
    assert again(x).equal(model(x))
    assert list(again.state_dict()) == list(model.state_dict())
    double = twin.double()
    assert double(x).dtype == torch.float64
    assert {value.dtype for value in double.kept().values()} == {torch.float64}
    assert {value.dtype for value in model.kept().values()} == {torch.float32}


def test_adapters_are_averaged_and_measured(folders: dict[str, Path]):
    """Two updates 1 and −1/2 of every trained number: mean 1/4, GSI √(5/8)/(1/4) = √10."""
    model = built(folders["bert"], lora=2)
    server = Server(model, adapter=Glad())
    update = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    record = server.step([update, {name: -value / 2 for name, value in update.items()}])
    assert list(record.gsi) == list(update)
    assert list(record.gsi.values()) == pytest.approx([10**0.5] * 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(server.state)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name] - 0.25, rtol=0, atol=1e-6)


# -------------------------------------------------------------------------- tied, LayerNorm, server


def test_a_tied_embedding_is_averaged_and_measured_once():
    """DistilBERT with its masked-language head, whose last matrix is the embedding."""
    torch.manual_seed(0)
    model = transformers.DistilBertForMaskedLM(small("distilbert")).eval()
    embedding = model.distilbert.embeddings.word_embeddings.weight
    assert model.vocab_projector.weight is embedding
    server = Server(model, adapter=Glad())
    name, tied = "distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight"
    before = {n: value.clone() for n, value in model.state_dict().items()}
    updates = [
        {n: c * torch.ones_like(p) for n, p in model.named_parameters()} for c in (1.0, -0.5)
    ]
    record = server.step(updates)
    assert name in record.gsi
    assert tied not in record.gsi
    norms = [n for n in record.gsi if "norm" in n.lower()]
    assert len(norms) == 2 * (1 + 2 * 2 + 1)  # scale and shift: embedding, two a layer, the head
    assert list(record.gsi.values()) == pytest.approx([10**0.5] * len(record.gsi))
    model.load_state_dict(server.state)
    assert model.vocab_projector.weight is model.distilbert.embeddings.word_embeddings.weight
    for n, value in model.state_dict().items():  # LayerNorm's are parameters like all others
        torch.testing.assert_close(value, before[n] - 0.25, rtol=0, atol=1e-6)


def test_a_tied_embedding_gets_both_gradients_in_the_loop():
    torch.manual_seed(0)
    model = still(transformers.DistilBertForMaskedLM(small("distilbert")))

    class Scores(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(input_ids=x.long()).logits[:, 0]

    x, _ = texts("distilbert")
    y = torch.randint(VOCABULARY, (13,), generator=torch.Generator().manual_seed(1))
    other = copy.deepcopy(model)
    bench = Workbench(Scores(model))
    theta, buffers = packed(bench.model)
    client = Plain(optimizer="sgd", lr=0.1, batch_size=13)
    bench.train(client, theta, buffers, x, y, stream(1, "c"))
    cross_entropy(other(input_ids=x.long()).logits[:, 0], y).backward()
    found = bench.layout.views(bench.w)
    assert "inner.vocab_projector.weight" not in found
    for name, parameter in other.named_parameters():
        wanted = parameter - 0.1 * (0 if parameter.grad is None else parameter.grad)
        torch.testing.assert_close(found[f"inner.{name}"], wanted.detach(), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------- sizes, mistakes


def test_distilberts_published_size():
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.DistilBertConfig())
    assert sum(p.numel() for p in model.parameters()) == 66_362_880


def test_minilms_size():
    """Six layers of 384: embeddings of 30,522 tokens, 512 places and 2 kinds, and a pooler."""
    wide, ffn = 384, 1536
    config = transformers.BertConfig(
        hidden_size=wide, num_hidden_layers=6, num_attention_heads=12, intermediate_size=ffn
    )
    config.num_labels = 20
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    layer = 4 * (wide * wide + wide) + 2 * wide * ffn + ffn + wide + 4 * wide
    embeddings = (30_522 + 512 + 2 + 2) * wide
    wanted = embeddings + 6 * layer + (wide * wide + wide) + (wide * 20 + 20)
    assert sum(p.numel() for p in model.parameters()) == wanted == Encoder.parameters
    assert len(list(model.parameters())) == 105


@pytest.mark.parametrize(
    ("field", "value", "must"),
    [
        ("classes", 1, "2 or more"),
        ("lora", -1, r"0 \(no adapters\) or more"),
        ("source", "", "a name or a folder"),
    ],
)
def test_wrong_settings_are_refused(field: str, value: Any, must: str):
    with pytest.raises(ValueError, match=rf"Encoder\({field}={value!r}\): must be {must}"):
        Encoder(**{field: value})


def test_only_where_padding_is_left_out_the_arithmetic_has_changed():
    """Batches are trained in pieces of like length since; others are computed as ever."""
    assert [Encoder(mask=mask).arithmetic for mask in (False, True)] == [1, 2]


def test_a_folder_without_an_encoder_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match=r"is a folder without an encoder that can be used: "):
        Encoder(source=str(tmp_path)).build()
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"is a folder without an encoder that can be used: .*mod"):
        Encoder(source=str(tmp_path)).build()


def test_a_name_that_the_hub_does_not_give_is_told():
    with pytest.raises(ValueError, match=r"'distil-nothing' is no folder, and the hub did not"):
        Encoder(source="distil-nothing").build()


def altered(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of an encoder's folder with other lines in its config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text("utf-8")) | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_code_in_a_folder_is_never_run(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to the question whether to run it
    names = {"AutoConfig": "own.Own", "AutoModelForSequenceClassification": "own.Model"}
    folder = altered(folders["bert"], tmp_path / "own", model_type="own", auto_map=names)
    code = f"open({str(tmp_path / 'was-run')!r}, 'w')\n"
    (folder / "own.py").write_text(code + "class Own: ...\nclass Model: ...\n")
    for weights in ("pretrained", "random"):
        with pytest.raises(ValueError, match="is a folder without an encoder that can be used"):
            built(folder, weights=weights)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"})
    )
    with pytest.raises(DataError, match="no tokenizer"):
        encoders.tokenise(str(folder), ["a"], 8)
    assert not (tmp_path / "was-run").exists()


def test_weights_that_do_not_fit_are_refused_and_not_made_up(
    tmp_path: Path, folders: dict[str, Path]
):
    misshaped = altered(folders["bert"], tmp_path / "a", hidden_size=16)
    absent = altered(folders["bert"], tmp_path / "b", num_hidden_layers=3)
    for folder, name in ((misshaped, "bert.embeddings"), (absent, "bert.encoder.layer.2")):
        with pytest.raises(ValueError, match=rf"do not fit its config.json: {name}.* more"):
            built(folder)
    built(absent, weights="random")


def test_a_head_and_a_pooler_may_be_new(tmp_path: Path, folders: dict[str, Path]):
    masked_words = transformers.AutoModelForMaskedLM.from_config(small("bert"))  # has no pooler
    masked_words.save_pretrained(tmp_path / "words")
    built(tmp_path / "words")
    nine = small("bert")
    nine.num_labels = 9
    other = transformers.AutoModelForSequenceClassification.from_config(nine)
    other.save_pretrained(tmp_path / "nine")
    assert built(tmp_path / "nine").model.classifier.out_features == CLASSES


def test_a_model_that_cannot_pad_is_refused(tmp_path: Path):
    sizes = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 20}
    config = transformers.AutoConfig.for_model("gpt2", **sizes, bos_token_id=1, eos_token_id=1)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no id that pads texts: choose an encoder"):
        built(tmp_path)


def test_what_transformers_says_is_left_as_it_was(folders: dict[str, Path]):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    built(folders["bert"])
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# ------------------------------------------------------------------------------------ the real ones


@pytest.mark.slow
def test_distilbert_from_a_folder(tmp_path: Path):
    torch.manual_seed(0)
    bare = transformers.AutoModel.from_config(transformers.DistilBertConfig()).eval()
    bare.save_pretrained(tmp_path)
    torch.manual_seed(1)
    model = Encoder(source=str(tmp_path), classes=20).build().eval()
    inner: Any = model.get_submodule("model.distilbert")
    assert sum(p.numel() for p in inner.parameters()) == 66_362_880
    x = torch.randint(1, 30_522, (3, 128), dtype=torch.int32)
    x[0, 40:] = 0
    with torch.no_grad():
        states = bare(input_ids=x.long()).last_hidden_state
        assert inner(input_ids=x.long()).last_hidden_state.equal(states)
        heads: Any = model.model
        wanted = heads.classifier(heads.pre_classifier(states[:, 0]).relu())
        torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [False, True])
def test_minilm_from_the_cache(mask: bool, tmp_path: Path):
    """Forward and a step of the packaged encoder against transformers, from its own files."""
    try:
        store.get("minilm")
    except DataError as reason:
        pytest.skip(f"minilm cannot be had here: {reason}")
    from safetensors.torch import save_file

    files = encoders.open("minilm")
    config = transformers.AutoConfig.for_model(**files.config)
    config.save_pretrained(tmp_path)
    tensors = {name: torch.from_numpy(value.copy()) for name, value in files.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    torch.manual_seed(2)
    model = Encoder(classes=CLASSES, mask=mask).build()
    assert isinstance(model, TextEncoder)
    assert sum(p.numel() for p in model.model.base_model.parameters()) == 22_713_216
    other = theirs(tmp_path, model).train()
    bare = transformers.AutoModel.from_pretrained(tmp_path).state_dict()
    assert all(value.equal(bare[n]) for n, value in model.model.base_model.state_dict().items())
    torch.manual_seed(4)
    x, y = torch.randint(1, 30_522, (6, 64), dtype=torch.int32), torch.tensor([0, 1, 2, 3, 0, 1])
    x[:, 33:] = 0
    x[2, 5:] = 0
    ids, given = (x[:, :33], masked(x[:, :33], "bert")) if mask else (x, {})
    with torch.no_grad():
        wanted = other.eval()(input_ids=ids.long(), **given).logits
        torch.testing.assert_close(model.eval()(x), wanted, rtol=0, atol=1e-5)
    bench = Workbench(model)
    client = Plain(optimizer="sgd", lr=0.05, batch_size=6)
    bench.train(client, bench.w.clone(), {}, x, y, stream(1, "c"))
    rng = stream(1, "c")
    torch.manual_seed(rng.bit_generator.random_raw())
    order = torch.from_numpy(rng.permutation(6))
    given = masked(ids[order], "bert") if mask else {}
    cross_entropy(other.train()(input_ids=ids[order].long(), **given).logits, y[order]).backward()
    found = bench.layout.views(bench.w)
    for name, parameter in other.named_parameters():
        wanted = (parameter - 0.05 * parameter.grad).detach()
        torch.testing.assert_close(found[f"model.{name}"], wanted, rtol=0, atol=1e-5)
