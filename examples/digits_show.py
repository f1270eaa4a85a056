"""What digits.py prints and draws. Nothing here trains."""

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from rich import box, progress
from rich.console import Console
from rich.table import Table

from fedglad import Record

mpl.use("Agg")
from matplotlib import pyplot as plt  # after the choice of a backend

console = Console(highlight=False, soft_wrap=True)

LAST = 10
# Student's t for 95 %, by the number of seeds from 2 on; beyond the table its end is used, which
# only makes the interval wider.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass
class Run:
    """One method with one seed: a value a round; `scale` is the mean over the tensors."""

    seed: int
    accuracy: list[float] = field(default_factory=list[float])
    gsi: list[float] = field(default_factory=list[float])
    scale: list[float] = field(default_factory=list[float])

    def add(self, accuracy: float, record: Record) -> None:
        if not record.stepped or record.gsi_all is None:
            raise RuntimeError(f"round {len(self.gsi)} was skipped: {record.reason}")
        self.accuracy.append(accuracy)
        self.gsi.append(record.gsi_all)
        self.scale.append(float(np.mean(list(record.scale.values()))))

    @property
    def last(self) -> float:
        return float(np.mean(self.accuracy[-LAST:]))

    @property
    def spread(self) -> float:
        """Standard deviation of the accuracy over the second half, without the forced round."""
        return float(np.std(self.accuracy[len(self.accuracy) // 2 + 1 :]))

    @property
    def baseline(self) -> list[float]:
        """What each round's GSI is compared with: the running mean before it, as in Glad."""
        usual = [self.gsi[0]]
        for gsi in self.gsi[:-1]:
            usual.append(0.9 * usual[-1] + 0.1 * gsi)
        return usual

    def change(self, t: int) -> float:
        return self.accuracy[t] - self.accuracy[t - 1]


class Progress:
    """A live line in a terminal; elsewhere one plain line a run."""

    def __init__(self, total: int) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, name: str, run: Run) -> None:
        t, accuracy = len(run.accuracy) - 1, run.accuracy[-1]
        line = f"seed {run.seed}  {name:8} round {t:3}  accuracy {accuracy:5.1f} %"
        self._bar.update(self._task, advance=1, description=line)

    def finish(self, name: str, run: Run) -> None:
        if not console.is_terminal:
            n = min(LAST, len(run.accuracy))
            console.print(f"seed {run.seed}  {name:8} last {n} rounds {run.last:5.1f} %")


def summary(plain: list[Run], glad: list[Run], forced: int) -> None:
    """The tables, and in words what they amount to."""
    pairs = list(zip(plain, glad, strict=True))
    last = min(LAST, len(plain[0].accuracy))

    rows = [(p.last, g.last, g.last - p.last, p.spread, g.spread) for p, g in pairs]
    _table(
        f"Test accuracy in %: mean of the last {last} rounds; std after round {forced}",
        {"FedAvg": ".1f", "FedGLAD": ".1f", "difference": "+.1f"}
        | {"std FedAvg": ".1f", "std FedGLAD": ".1f"},
        {str(run.seed): row for run, row in zip(plain, rows, strict=True)},
    )
    console.print(_verdict([row[2] for row in rows]))
    factor = np.mean([g.scale for g in glad])
    console.print(
        f"FedGLAD's factor was {factor:.2f} on average. Not shown: FedAvg with a tuned constant\n"
        "server rate, with which any adaptive rule should be compared too."
    )

    rows = [
        (g.gsi[forced], g.baseline[forced], g.scale[forced], p.change(forced), g.change(forced))
        for p, g in pairs
    ]
    gsi, usual, factor, *changes = _table(
        f"Round {forced}, forced: five clients with (almost) one digit only; change of accuracy",
        {"GSI": ".2f", "baseline": ".2f", "factor": ".2f", "FedAvg": "+.1f", "FedGLAD": "+.1f"},
        {str(run.seed): row for run, row in zip(plain, rows, strict=True)},
    )
    console.print(_verdict([g - p for *_, p, g in rows]))
    console.print(
        f"The five updates agreed {'more' if gsi < usual else 'no more'} than usual, GSI "
        f"{gsi:.2f} against {usual:.2f}: FedGLAD scaled\nthe step by {factor:.2f}, and accuracy "
        f"changed by {changes[1]:+.1f} points, with FedAvg by {changes[0]:+.1f}."
    )


def _table(title: str, columns: dict[str, str], rows: dict[str, tuple[float, ...]]) -> np.ndarray:
    """Prints a row a seed and the means, which it returns; `columns` are headings and formats."""
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None)
    for heading in ("seed", *columns):
        table.add_column(heading, justify="right")
    means = np.mean(list(rows.values()), axis=0)
    for label, row in [*rows.items(), ("mean", means)]:
        cells = [format(float(x), form) for x, form in zip(row, columns.values(), strict=True)]
        table.add_row(label, *cells, style="bold" if label == "mean" else None)
    console.print(f"\n[bold]{title}[/bold]", table, sep="\n")
    return means


def _verdict(differences: list[float]) -> str:
    """Says what the paired differences can and cannot tell."""
    n, mean = len(differences), float(np.mean(differences))
    if n == 1:
        return f"FedGLAD minus FedAvg: {mean:+.1f} points; one seed cannot tell it from noise."
    half = T95[min(n, 10) - 2] * float(np.std(differences, ddof=1)) / n**0.5
    verdict = "within noise" if abs(mean) <= half else "more than noise"
    interval = f"{mean:+.1f} ± {half:.1f} points (95 %, {n} paired seeds)"
    return f"FedGLAD minus FedAvg: {interval}: {verdict}."


FEDAVG, FEDGLAD = "#D55E00", "#0072B2"  # told apart by the colour-blind (Okabe and Ito)
INK, FAINT = "#333333", "#999999"
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#EEEEEE",
    "ytick.left": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def plot(plain: list[Run], glad: list[Run], forced: int, path: Path) -> None:
    """Accuracy of both methods above GSI and its baseline, the forced round marked in both."""
    with plt.rc_context(STYLE):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        thick = "one seed" if len(plain) == 1 else f"mean of {len(plain)} seeds, each of them thin"
        _lines(top, [run.accuracy for run in plain], FEDAVG, "FedAvg")
        _lines(top, [run.accuracy for run in glad], FEDGLAD, "FedGLAD")
        top.set(title=f"Test accuracy (%), {thick}", ylim=(0, 100))
        _lines(bottom, [run.gsi for run in glad], FEDGLAD, "GSI")
        usual = np.mean([run.baseline for run in glad], axis=0)
        bottom.plot(
            usual, color=INK, linestyle=(0, (4, 2)), linewidth=1.6, label="its running baseline"
        )
        bottom.set(title="GSI over all parameters: 1 if the five updates agree")
        bottom.set(xlabel="Round", xlim=(0, len(usual) - 1))
        bottom.xaxis.get_major_locator().set_params(integer=True)
        for axes in (top, bottom):
            axes.axvline(forced, color=FAINT, linewidth=1.2, linestyle=":", zorder=1)
            axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
        note = f"round {forced} is forced:\nfive clients, one digit"
        at = {"xytext": (-8, 4), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        top.annotate(note, (forced, 0), fontsize=10, **at)
        figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.2)
        plt.close(figure)
    console.print(
        f"\nPlot: {path}\nLook at round {forced}: below, GSI against its baseline; above, what the "
        "round did to\naccuracy, and how soon both recover.",
        markup=False,
    )


def _lines(axes: Axes, curves: list[list[float]], color: str, label: str) -> None:
    """Every seed thin, their mean thick."""
    for curve in curves:
        axes.plot(curve, color=color, linewidth=0.7, alpha=0.3)
    axes.plot(np.mean(curves, axis=0), color=color, linewidth=2.4, label=label)
