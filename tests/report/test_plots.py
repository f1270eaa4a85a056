"""Static plots: files for papers, hostile names drawn as they are, the same bytes again."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedglad.report import plots
from fedglad.report.plots import factors, rounds, style

T = 12
FLAGS = {4: "one-sided", 9: "outlier"}


def a_run(name: str = "run1", *, group: int = 0, shift: float = 0.0, groups: int = 3) -> Any:
    """A run as in the report's payload: GSI falls in round 5 and jumps in round 10."""
    rounds = list(range(1, T + 1))
    gsi: list[float | None] = [2.0 + shift] * T
    gsi[4], gsi[9], gsi[10] = 1.2, 4.0, None
    scale = [[1.0 + 0.02 * (t - 6) * (k + 1) / groups for t in range(T)] for k in range(groups)]
    return {
        "name": name,
        "label": "adapter.name=glad",
        "group": group,
        "rounds": rounds,
        "scores": [50 + 3 * t + 10 * shift if t % 2 else None for t in range(T)],
        "test_loss": [2.0 / t for t in rounds],
        "train_loss": [1.5 / t for t in rounds],
        "gsi": gsi,
        "usual": [None] * 3 + [2.0] * (T - 3),
        "alarm": [FLAGS.get(t) for t in range(T)],
        "similarity": [0.5 + 0.03 * t for t in range(T)],
        "heat": {
            "groups": [f"layer{k}.weight" for k in range(groups)],
            "scale": scale,
            "ratio": [[2 * s - 1 for s in row] for row in scale],
        },
        "fit": {"n": 11, "r": 0.4321, "slope": 1.0, "intercept": 1.0},
    }


def a_payload(*runs: Any, groups: list[Any] | None = None) -> dict[str, Any]:
    runs = runs or (a_run(),)
    one = [{"label": "adapter.name=glad", "baseline": False, "runs": list(range(len(runs)))}]
    score = {"name": "accuracy", "words": "accuracy", "share": True}
    shown = {"groups": groups or one, "runs": list(runs)}
    return {"version": 2, "title": "t", "score": score, **shown}


def texts(path: Path) -> list[str]:
    """The text elements of an SVG, as a reader sees them."""
    root = ElementTree.parse(path).getroot()
    return [
        "".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")
    ]


FILES = ("rounds", "factors", "similarity")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The charts of one run in every format."""
    folder = tmp_path_factory.mktemp("plots")
    return {format: plots.write(a_payload(), folder, format) for format in plots.FORMATS}


@pytest.mark.parametrize("format", plots.FORMATS)
def test_the_same_payload_gives_the_same_bytes(
    format: str, drawn: dict[str, list[Path]], tmp_path: Path
):
    assert [path.name for path in drawn[format]] == [f"{name}.{format}" for name in FILES]
    again = plots.write(a_payload(), tmp_path, format)
    assert [p.read_bytes() for p in drawn[format]] == [p.read_bytes() for p in again]


def test_a_users_own_style_changes_nothing(drawn: dict[str, list[Path]], tmp_path: Path):
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 5, "text.usetex": True}):
        styled = plots.write(a_payload(), tmp_path, "svg")
        assert matplotlib.rcParams["font.size"] == 20
    assert [p.read_bytes() for p in drawn["svg"]] == [p.read_bytes() for p in styled]


def test_pictures_have_the_width_of_a_column(drawn: dict[str, list[Path]]):
    for path in drawn["png"]:
        with Image.open(path) as picture:
            assert picture.width == 990  # 3.3 inch × 300
    for path in drawn["pdf"]:
        box = re.search(rb"/MediaBox \[\s*0 0 ([\d.]+) ", path.read_bytes())
        assert box
        assert float(box[1]) == pytest.approx(3.3 * 72)


def test_fonts_are_embedded_and_nothing_tells_when_or_where(drawn: dict[str, list[Path]]):
    for path in drawn["pdf"]:
        found = path.read_bytes()
        assert b"/FontFile2" in found
        assert b"/Type3" not in found
        assert b"CreationDate" not in found
    for path in drawn["svg"]:
        assert "<dc:date>" not in path.read_text("utf-8")


HOSTILE = ["$x^2$", "$", r"\frac{", "<script>alert(1)</script>", "_hidden", "a&b", "100 %", "$$"]


def test_names_are_drawn_as_they_are(tmp_path: Path):
    run = a_run("$x^2$ & <b>", groups=len(HOSTILE))
    run["heat"]["groups"] = HOSTILE
    groups = [{"label": name, "baseline": False, "runs": [0]} for name in HOSTILE]
    payload = a_payload(run, groups=groups)
    above, beside, title = map(texts, plots.write(payload, tmp_path, "svg"))
    assert set(HOSTILE) <= set(above)
    assert {style.short(name, factors.TICK) for name in HOSTILE} <= set(beside)
    assert "$x^2$ & <b>" in title
    assert len(plots.write(payload, tmp_path, "pdf")) == 3


def test_what_cannot_be_drawn_is_replaced(tmp_path: Path):
    run = a_run("line\nbreak \x00 \u202e \ud800 漢字")
    similarity = plots.write(a_payload(run), tmp_path, "svg")[2]
    (title,) = (text for text in texts(similarity) if text.startswith("line"))
    assert title == "line\ufffdbreak \ufffd \ufffd \ufffd 漢字"


@given(st.text(max_size=100), st.integers(5, 60))
def test_short_names_keep_both_ends(text: str, most: int):
    found = style.short(text, most)
    assert len(found) == min(len(text), most)
    if len(text) > most:
        assert style.clean(text).startswith(found.partition("…")[0]) or "…" in text
        assert style.clean(text).endswith(found[-2:])


def test_200_groups_have_labels_that_do_not_touch():
    run = a_run(groups=200)
    with style.paper_style():
        figure = factors.draw(run)
        figure.savefig("/dev/null", format="png", dpi=100)
        assert figure.get_size_inches()[1] < 9
        for axes in figure.axes[:2]:
            boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
            assert 15 <= len(boxes) <= 40
            lower_edges, upper_edges = [b.y0 for b in boxes], [b.y1 for b in boxes]
            # from above: each label ends above where the next begins
            assert all(a > b for a, b in zip(lower_edges, upper_edges[1:], strict=False))


def test_long_names_lose_what_they_share_first():
    names = [f"encoder.layers.{k}.attention.output.weight" for k in (0, 11)]
    assert factors._group_names(names) == ["…0.attentio…put.weight", "…11.attenti…put.weight"]
    assert factors._group_names(["conv.weight", "conv.bias"]) == ["conv.weight", "conv.bias"]
    assert factors._group_names(["a" * 30]) == [f"{'a' * 11}…{'a' * 10}"]


def test_the_scale_is_centred_at_one_and_says_what_is_beyond():
    run = a_run(groups=1)
    run["heat"] = {"groups": ["g"], "scale": [[1.0] * T], "ratio": [[1.0] * (T - 1) + [1000.0]]}
    with style.paper_style():
        figure = factors.draw(run)
        image = figure.axes[0].collections[0]
        # of 24 distances 23 are 0: quantile .98 is at 22.54, .54 of the way from 0 to 999: cut to 1
        assert image.get_clim() == (0.0, 2.0)
        red, green, blue, _ = image.cmap(image.norm(1.0))
        assert min(red, green, blue) > 0.95
        assert figure.axes[1].collections[0].colorbar.extend == "max"


def test_a_round_that_is_not_there_is_a_gap():
    table = factors._table([3, 4, 6], [[1.0, None, 2.0]])
    np.testing.assert_array_equal(factors._edges([3, 4, 6]), [2.5, 3.5, 4.5, 5.5, 6.5])
    np.testing.assert_array_equal(table, [[1.0, np.nan, np.nan, 2.0]])


def test_a_gap_of_any_size_takes_no_memory():
    run = {k: v[:2] if isinstance(v, list) else v for k, v in a_run().items()}
    run["rounds"] = [1, 900_000_001]
    run["heat"] = {"groups": ["g"], "scale": [[0.5, 1.5]], "ratio": [[None, None]]}
    with style.paper_style():
        figure = factors.draw(run)
        figure.savefig("/dev/null", format="svg")
        (mesh,) = figure.axes[0].collections
    # a round, the gap, a round
    np.testing.assert_array_equal(mesh.get_array().filled(np.nan), [[0.5, np.nan, 1.5]])
    assert figure.axes[0].get_xlim() == (0.5, 900_000_001.5)


def test_the_first_group_is_above():
    with style.paper_style():
        axes = factors.draw(a_run()).axes[0]
    assert axes.get_ylim() == (2.5, -0.5)


def test_seeds_are_a_band_around_their_mean():
    payload = a_payload(a_run("a", shift=0.0), a_run("b", shift=1.0))
    with style.paper_style():
        figure = rounds.draw(payload)
        gsi = figure.axes[-1]
        line = gsi.lines[0]
        # GSI 2 and 3: mean 2.5, sample std √.5; 1.2 twice: 1.2; round 11 has none
        assert list(line.get_xdata()) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]
        assert line.get_ydata()[0] == 2.5
        assert line.get_ydata()[4] == 1.2
        (band,) = (c for c in gsi.collections if c.get_alpha() == style.BAND)
        low, high = band.get_paths()[0].get_extents().y0, band.get_paths()[0].get_extents().y1
        assert low == pytest.approx(1.2)
        assert high == pytest.approx(4.0)
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["adapter.name=glad (mean ± std of 2 seeds)"]


def test_distrusted_rounds_are_marked():
    with style.paper_style():
        figure = rounds.draw(a_payload())
        marks = [c.get_offsets().tolist() for c in figure.axes[-1].collections]
    assert marks == [[[5.0, 1.2]], [[10.0, 4.0]]]


def test_a_mark_stands_for_half_of_the_seeds():
    three = [a_run(str(k)) for k in range(3)]
    three[0]["alarm"] = three[1]["alarm"] = [None] * T
    assert style.flagged(three) == {"one-sided": [], "outlier": []}
    assert style.flagged(three[1:]) == {"one-sided": [5], "outlier": [10]}


def test_a_chart_without_data_is_left_out_and_named(tmp_path: Path):
    run = a_run()
    run["heat"], run["similarity"], run["fit"] = None, None, None
    assert [p.name for p in plots.write(a_payload(run), tmp_path, "png")] == ["rounds.png"]
    assert plots.left_out(a_payload(run)) == [
        "factors of run1: no group was scaled or compared",
        "GSI against label similarity of run1: it is not recorded",
    ]
    assert plots.left_out(a_payload()) == []
    empty: dict[str, Any] = {
        key: [] if isinstance(value, list) else None for key, value in run.items()
    }
    empty["name"] = "run1"
    assert plots.write(a_payload(empty), tmp_path / "none", "png") == []
    assert len(plots.left_out(a_payload(empty))) == 3


def test_a_flower_run_without_test_figures_is_drawn(tmp_path: Path):
    run = a_run()
    run["scores"], run["test_loss"], run["similarity"] = [None] * T, [None] * T, None
    drawn = texts(plots.write(a_payload(run), tmp_path, "svg")[0])
    assert "GSI" in drawn
    assert "test accuracy (%)" not in drawn


def test_each_run_has_its_own_files(tmp_path: Path):
    runs = [a_run("a/b"), a_run("a:b"), a_run("..")]
    written = [path.name for path in plots.write(a_payload(*runs), tmp_path, "png")]
    assert written == [
        "rounds.png",
        *("factors-a_b.png", "similarity-a_b.png"),
        *("factors-a_b-2.png", "similarity-a_b-2.png"),
        *("factors-run.png", "similarity-run.png"),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(written)


def test_a_run_of_one_round_is_drawn(tmp_path: Path):
    run = {k: v[:1] if isinstance(v, list) else v for k, v in a_run().items()}
    run["heat"] = {"groups": ["g"], "scale": [[1.0]], "ratio": [[None]]}
    run["fit"], run["scores"] = None, [10.0]
    assert len(plots.write(a_payload(run), tmp_path, "png")) == 3


def test_without_alarms_the_charts_have_their_room():
    run = a_run()
    run["alarm"] = [None] * T
    with style.paper_style():
        figure = factors.draw(run)
        figure.savefig("/dev/null", format="png", dpi=100)
        assert figure.axes[0].get_position().height > 0.2


def test_many_configurations_fit():
    runs = [a_run(f"r{k}", group=k) for k in range(20)]
    long = "adapter.name=glad, server.lr=0.5, client.epochs=5, sampler.clients_per_round=10, "
    groups = [{"label": f"{long}{k}", "baseline": False, "runs": [k]} for k in range(20)]
    with style.paper_style():
        figure = rounds.draw(a_payload(*runs, groups=groups))
        figure.savefig("/dev/null", format="png", dpi=100)
        legend = figure.legends[0]
        drawn = [text.get_text() for text in legend.get_texts()]
        assert len(set(drawn)) == 15
        assert drawn[-1] == "and 6 more"
        assert {len(text) for text in drawn[:-1]} == {rounds.LABEL}
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= 330
        assert box.y0 > figure.axes[0].get_window_extent().y1


def test_an_unknown_format_and_a_file_in_the_way_are_told(tmp_path: Path):
    with pytest.raises(ValueError, match="unknown format 'gif': choose from png, svg, pdf"):
        plots.write(a_payload(), tmp_path, "gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        plots.write(a_payload(), tmp_path / "file", "png")


def test_without_matplotlib_the_way_out_is_told():
    script = """
import sys
sys.modules["matplotlib"] = None
from fedglad.report import plots
from fedglad.report.plots import factors, rounds, style
try:
    plots.write({"groups": [], "runs": []}, None, "png")
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "plots need matplotlib: pip install 'fedglad[report]'\n", done.stderr
