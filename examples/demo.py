"""FedAvg with and without FedGLAD on handwritten digits, and one bad round forced on both.

    python examples/demo.py [--seeds 5] [--rounds 60] [--jobs 2] [--out out]

Fifty clients, five a round. Two thirds through the run only clients take part that hold mostly one
digit, the same one: that of which its holders have the largest share, chosen by the partition and
not by results. Everything else is the preset `digits`, which also keeps the running average of the
models: training does not see it, but it is what one would deploy. A seed fixes the first weights,
the batches and the cohorts of all other rounds, so both methods meet the same ones.

The runs are those of the command line, and stay in OUT/demo: another call finds them there.
"""

import argparse
import os
import sys
import textwrap
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from fedglad.analysis import compare
from fedglad.analysis.statistics import interval
from fedglad.cli.compare import show_comparison
from fedglad.cli.progress import ShowSweep
from fedglad.data import Digits
from fedglad.runs import Interrupted, Run, Task, sweep, tasks

mpl.use("Agg")
from matplotlib import pyplot as plt  # after the choice of a backend

METHODS = {"none": "FedAvg", "glad": "FedAvg + FedGLAD"}
COHORT = 5
NEAR = 5  # rounds before and after the forced one


@dataclass(frozen=True)
class Curves:
    """A method's runs, one row a seed, one column a round; `scale` also has the tensors.

    `averaged` is the accuracy of the average of the models so far.
    """

    accuracy: np.ndarray
    averaged: np.ndarray
    gsi: np.ndarray
    scale: np.ndarray

    @classmethod
    def read(cls, folders: list[Path]) -> "Curves":
        runs = [Run(folder).rounds() for folder in folders]
        scales = [[[group["scale"] for group in r["groups"].values()] for r in run] for run in runs]
        return cls(
            100 * np.array([[r["test_accuracy"] for r in run] for run in runs]),
            100 * np.array([[r["averaged_accuracy"] for r in run] for run in runs]),
            np.array([[r["gsi_all"] for r in run] for run in runs]),
            np.array(scales),
        )

    @property
    def usual_gsi(self) -> np.ndarray:
        """What a round's GSI is compared with: the running mean before it, as in Glad(beta=0.9)."""
        usual = [self.gsi[:, 0]]
        for gsi in self.gsi.T[:-1]:
            usual.append(0.9 * usual[-1] + 0.1 * gsi)
        return np.array(usual).T


def around(accuracy: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By seed: mean of the rounds before round t, in it, mean of those after it."""
    before, after = accuracy[:, max(t - NEAR, 0) : t], accuracy[:, t + 1 :][:, :NEAR]
    return before.mean(axis=1), accuracy[:, t], after.mean(axis=1)


def last10(accuracy: np.ndarray) -> np.ndarray:
    """By seed: mean of the last ten rounds."""
    return accuracy[:, -10:].mean(axis=1)


def one_digit(counts: np.ndarray) -> int:
    """Of the digits that enough clients hold mostly, the one they hold most purely."""
    shares: dict[int, float] = {}
    for digit in range(10):
        own = counts[counts.argmax(axis=1) == digit]
        if len(own) >= COHORT:
            shares[digit] = float(own[:, digit].sum() / own.sum())
    return max(shares, key=lambda digit: shares[digit])


def plan(seeds: int, rounds: int, forced: int, digit: int, out: Path) -> list[Task]:
    """The same as `fedglad sweep digits --grid … --set …`; rounds in a script count from 0."""
    grids = [f"seed={','.join(str(k + 1) for k in range(seeds))}", "adapter.name=none,glad"]
    overrides = {
        "rounds": rounds,
        "sampler.name": "scripted",
        "sampler.clients_per_round": COHORT,
        "sampler.largest_class": {str(forced - 1): digit},
        "sampler.seed": "run",  # each seed has its own cohorts
    }
    return tasks("digits", grids, overrides, out)


def play(todo: list[Task], jobs: int) -> None:
    """Runs what is missing; leaves with what went wrong, if anything did."""
    missing = [task for task in todo if not task.finished]
    if done := len(todo) - len(missing):
        folder = todo[0].folder.parent
        print(f"{done} of {len(todo)} runs are in {folder} already (remove it to run them anew).")
    failed: list[str] = []
    try:
        with ShowSweep(missing, quiet=False) as show, closing(sweep(missing, jobs=jobs)) as events:
            for event in events:
                show.event(event)
                failed += [event.reason] if event.what == "failed" else []
    except (Interrupted, KeyboardInterrupt):
        print("Stopped; the same command goes on from here.", file=sys.stderr)
        sys.exit(130)
    if failed:
        sys.exit(f"{len(failed)} runs failed, the first one with: {failed[0]}")


def tell(plain: Curves, glad: Curves, forced: int, who: str) -> None:
    """In words, and whatever it is, what the runs show."""
    t = forced - 1
    say(
        "adapter.name=none is FedAvg, adapter.name=glad is FedAvg + FedGLAD; averaged is the "
        "running average of the same run's models."
    )
    print()
    say(
        f"Round {forced} was forced: {who}. Test accuracy there, and the mean of up to {NEAR} "
        "rounds before and after:"
    )
    print(f"\n{'':28}{'before':>9}{'round ' + str(forced):>11}{'after':>9}")
    for name, curves in zip(METHODS.values(), (plain, glad), strict=True):
        for what, accuracy in ((name, curves.accuracy), (f"{name}, averaged", curves.averaged)):
            before, at, after = (f"{x.mean():.1f} %" for x in around(accuracy, t))
            print(f"{what:28}{before:>9}{at:>11}{after:>9}")
    print()

    gsi, usual, scale = glad.gsi[:, t].mean(), glad.usual_gsi[:, t].mean(), glad.scale[:, t]
    say(
        f"The updates agreed {'' if gsi < usual else 'no '}more than usual: GSI {gsi:.2f}, "
        f"its running mean {usual:.2f}. FedGLAD multiplied the step by {scale.mean():.2f} "
        f"({scale.min():.2f} to {scale.max():.2f} over tensors and seeds; mean over all rounds "
        f"{glad.scale.mean():.2f})."
    )
    drops = [
        around(curves.accuracy, t)[1] - around(curves.accuracy, t)[0] for curves in (plain, glad)
    ]
    say(
        f"In that round accuracy changed by {drops[0].mean():+.1f} points with FedAvg, by "
        f"{drops[1].mean():+.1f} with FedGLAD. The difference: {verdict(drops[1] - drops[0])}"
    )
    print("At the end, over the last 10 rounds:")
    newest, averaged = last10(plain.accuracy), last10(plain.averaged)
    for what, differences, better in (
        ("FedGLAD over FedAvg", last10(glad.accuracy) - newest, "with FedGLAD"),
        ("FedAvg's average over its newest model", averaged - newest, "averaged"),
        ("FedGLAD over FedAvg, both averaged", last10(glad.averaged) - averaged, "with FedGLAD"),
    ):
        say(f"- {what}: {verdict(differences, better)}")


def say(text: str) -> None:
    print(textwrap.fill(text, 88))


def verdict(differences: np.ndarray, better: str = "with FedGLAD") -> str:
    """A mean difference by seed with its interval, and whether that tells the two apart."""
    mean, n = differences.mean(), len(differences)
    bounds = interval(differences.tolist())
    if bounds is None:
        return f"{mean:+.1f} points, and too few seeds to tell that from chance."
    told = f"{mean:+.1f} points (95 %: {bounds[0]:+.1f} to {bounds[1]:+.1f}, {n} seeds)"
    if bounds[0] <= 0 <= bounds[1]:
        return f"{told}, no more than chance could make."
    return f"{told}, {'better' if mean > 0 else 'worse'} {better}."


COLOURS = {"none": "#D55E00", "glad": "#0072B2"}  # told apart by the colour-blind (Okabe and Ito)
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


def plot(plain: Curves, glad: Curves, forced: int, who: str, path: Path) -> None:
    """Accuracy of both, also averaged; below it FedGLAD's GSI; the forced round marked."""
    seeds, rounds = glad.gsi.shape
    with plt.rc_context(STYLE):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        thick = "one seed" if seeds == 1 else f"mean of {seeds} seeds, each of them thin"
        _lines(top, plain.accuracy, COLOURS["none"], METHODS["none"])
        _lines(top, glad.accuracy, COLOURS["glad"], METHODS["glad"])
        at, dashes = np.arange(1, rounds + 1), (0, (4, 2))
        for name, curves in (("none", plain), ("glad", glad)):
            mean, label = curves.averaged.mean(axis=0), f"{METHODS[name]}, averaged"
            top.plot(at, mean, color=COLOURS[name], linestyle=":", linewidth=2.4, label=label)
        top.set_title(f"Test accuracy (%), {thick}", pad=46)  # above two rows of the legend
        top.set(ylim=(0, 100))
        _lines(bottom, glad.gsi, COLOURS["glad"], "GSI")
        usual = glad.usual_gsi.mean(axis=0)
        bottom.plot(at, usual, color=INK, linestyle=dashes, linewidth=1.6, label="its running mean")
        bottom.set(title="GSI with FedGLAD: 1 if the updates are equal", xlabel="Round")
        bottom.set(xlim=(1, rounds), ylim=(1, None))
        bottom.set_xticks(sorted({1, *range(10, rounds + 1, 10), forced}))
        for axes in (top, bottom):
            axes.axvline(forced, color=FAINT, linewidth=1.2, linestyle=":", zorder=1)
            axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
        place = {"xytext": (8, 6), "textcoords": "offset points", "ha": "left", "va": "bottom"}
        note = textwrap.fill(f"round {forced} is forced: {who}", 30)
        top.annotate(note, (forced, 0), fontsize=10, **place)
        figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.2)
        plt.close(figure)


def _lines(axes: Axes, curves: np.ndarray, color: str, label: str) -> None:
    at = np.arange(1, curves.shape[1] + 1)
    for curve in curves:
        axes.plot(at, curve, color=color, linewidth=0.7, alpha=0.3)
    axes.plot(at, curves.mean(axis=0), color=color, linewidth=2.4, label=label)


def main() -> None:
    parser = argparse.ArgumentParser(description="FedAvg with and without FedGLAD on digits.")
    parser.add_argument("--seeds", type=int, default=5, help="repetitions (default 5)")
    parser.add_argument("--rounds", type=int, default=60, help="of each run (default 60)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of plot and runs")
    args = parser.parse_args()
    if args.seeds < 1 or args.rounds < 6 or args.jobs < 1:
        parser.error("needs --seeds and --jobs of at least 1 and --rounds of at least 6")
    forced = 2 * args.rounds // 3
    data = Digits().load_federation()
    counts = np.array([data.labels(k) for k in range(data.clients)])
    digit = one_digit(counts)
    todo = plan(args.seeds, args.rounds, forced, digit, args.out / "demo")
    args.out.mkdir(parents=True, exist_ok=True)
    play(todo, args.jobs)
    cohorts = [Run(task.folder).rounds()[forced - 1]["clients"] for task in todo]
    took_part = counts[[client["id"] for cohort in cohorts for client in cohort]].sum(axis=0)
    share = 100 * took_part[digit] / took_part.sum()
    who = f"{COHORT} clients, {share:.0f} % of whose images are a {digit}"
    print()
    show_comparison(compare([task.folder for task in todo], baseline="adapter.name=none"))
    print()
    curves = {
        name: Curves.read([t.folder for t in todo if t.settings["adapter.name"] == name])
        for name in METHODS
    }
    tell(curves["none"], curves["glad"], forced, who)
    plot(curves["none"], curves["glad"], forced, who, args.out / "digits.png")
    print(f"\nPlot: {args.out / 'digits.png'}")


if __name__ == "__main__":
    main()
