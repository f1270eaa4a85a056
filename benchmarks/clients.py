"""Does `Trust` find clients that attack? Runs on digits and MNIST with attackers; no timing.

    python benchmarks/clients.py                     # what `Trust()` finds, and what is false
    python benchmarks/clients.py --fit --seeds 1,2,3 # what other thresholds would

A run has 40 rounds with 10 of 50 clients, and 10, 20 or 40 % of the 50 attack whenever they take
part. They

- permuted: train on labels moved up by a number from 1 to 9, another for every attacker,
- flipped: send the opposite of their update,
- boosted: send ten times their update,
- little-is-enough: all send the mean of what all attackers would honestly send, less 1.5 times its
  standard deviation in every coordinate (Baruch et al. 2019),
- inner-product: all send −0.5 times the mean of the round's honest updates (Xie et al. 2020).

The last two send equal updates if there are two of them in a round, which the flag `copied` finds
at once, and which a little noise would hide: it is left out of all tables but one. Digits have the
small CNN, MNIST 3,000 images and an MLP with 32 hidden units. One run for every seed, data set,
partition, attack and share of attackers, and one without. `--keep DIR` keeps them (7 MB each) and
finds them again.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _attacks import ATTACKS, CLIENTS, COHORT, DATA, PARTS, ROUNDS, Attacked, Setting, campaign
from _forced import PARTITIONS
from _shared import machine, table

from fedglad.records import FLAGS
from fedglad.trust import Kept, Trust, Verdict

NO_COPIES = FLAGS[:-1]
AIMED = [(attack, 20) for attack in ("flipped", "boosted", "inner-product")]


@dataclass(frozen=True)
class Judged:
    """A run's verdicts by round, who attacked, and the alarm's flags."""

    setting: Setting
    rounds: list[list[Verdict]]
    alarms: list[str]
    accuracy: float

    def each(self, attacker: bool) -> list[Verdict]:
        """The verdicts on attackers, or on all others."""
        return [v for round in self.rounds for v in round if self.attacks(v) == attacker]

    def attacks(self, verdict: Verdict) -> bool:
        return verdict.client in self.setting.attackers

    def clients(self, attacker: bool) -> list[list[Verdict]]:
        """The same, one list a client."""
        verdicts = sorted(self.each(attacker), key=lambda v: str(v.client))
        return [list(own) for _, own in itertools.groupby(verdicts, key=lambda v: v.client)]


def judged(run: Attacked, trust: Trust) -> Judged:
    kept, rounds = Kept(), list[list[Verdict]]()
    for seen in run.rounds:
        verdicts, kept = trust.judge(seen, kept)
        rounds.append(verdicts)
    return Judged(run.setting, rounds, run.alarms, run.accuracy)


# --------------------------------------------------------------------------------------- counting

Says = Callable[[Verdict], bool]


def flagged(verdict: Verdict, flags: Iterable[str] = NO_COPIES) -> bool:
    return any(flag in verdict.flags for flag in flags)


def mostly(verdicts: Sequence[Verdict]) -> bool:
    """Whether a client is flagged in at least half of its rounds."""
    return 2 * sum(map(flagged, verdicts)) >= len(verdicts)


def chosen(runs: Iterable[Judged], **wanted: object) -> list[Judged]:
    return [run for run in runs if all(getattr(run.setting, key) == wanted[key] for key in wanted)]


def rates(runs: Sequence[Judged], says: Says = flagged) -> tuple[str, str, str]:
    """Found, false alarms and precision over all clients of all rounds."""
    return _rates(*([says(v) for run in runs for v in run.each(who)] for who in (True, False)))


def rates_of_clients(runs: Sequence[Judged]) -> tuple[str, str, str]:
    return _rates(*([mostly(own) for run in runs for own in run.clients(w)] for w in (True, False)))


def _rates(bad: Sequence[bool], good: Sequence[bool]) -> tuple[str, str, str]:
    hits, false = sum(bad), sum(good)
    return share(hits, len(bad)), share(false, len(good)), share(hits, hits + false)


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} % ({part:,}/{whole:,})" if whole else "–"


# ----------------------------------------------------------------------------------------- tables

FORMS = [("none", 0), *itertools.product(ATTACKS, PARTS)]


def measure(runs: Sequence[Judged], trust: Trust) -> None:
    """What the library's rule finds."""
    print(f"\n{trust}")
    head = ("found", "false alarms", "precision")
    print("\nEvery client in every round:")
    by_form = {form: chosen(runs, attack=form[0], part=form[1]) for form in FORMS}
    by_form = {form: own for form, own in by_form.items() if own}
    table(
        ("attack", "attackers", *head), [(a, f"{p} %", *rates(by_form[a, p])) for a, p in by_form]
    )
    print("\nClients, flagged in at least half of their rounds:")
    table(
        ("attack", "attackers", *head),
        [(a, f"{p} %", *rates_of_clients(by_form[a, p])) for a, p in by_form],
    )
    for title, place in (("found", 0), ("false alarms", 1)):
        print(f"\nWith 20 % attackers, by data and partition: {title}")
        table(
            ("data", "clients", *ATTACKS),
            [
                (
                    data,
                    partition,
                    *(
                        rates(
                            chosen(by_form.get((attack, 20), []), data=data, partition=partition)
                        )[place]
                        for attack in ATTACKS
                    ),
                )
                for data, partition in itertools.product(DATA, PARTITIONS)
            ],
        )
    print("\nWith 20 % attackers, by which flag:")
    table(
        ("flag", *ATTACKS, "false, these runs and without"),
        [
            (
                f"`{flag}`",
                *(rates(by_form.get((attack, 20), []), _has(flag))[0] for attack in ATTACKS),
                rates([run for run in runs if run.setting.part in (0, 20)], _has(flag))[1],
            )
            for flag in FLAGS
        ],
    )
    print("\nRounds with attackers in them, and rounds without, in which something is flagged:")
    sides = ("alarm, with", "trust, with", "alarm, without", "trust, without")
    table(
        ("attack", "attackers", *sides),
        [(a, f"{p} %", *_rounds(by_form[a, p])) for a, p in by_form],
    )


def _has(flag: str) -> Says:
    return lambda verdict: flag in verdict.flags


def _rounds(runs: Sequence[Judged]) -> list[str]:
    """Rounds flagged by the alarm (as outlier) and by `Trust` (with: an attacker is flagged)."""
    counts: dict[tuple[bool, str], list[bool]] = {}
    for run in runs:
        for verdicts, alarm in zip(run.rounds, run.alarms, strict=True):
            bad = [v for v in verdicts if run.attacks(v)]
            counts.setdefault((bool(bad), "alarm"), []).append(alarm == "outlier")
            counts.setdefault((bool(bad), "trust"), []).append(any(map(flagged, bad or verdicts)))
    places = itertools.product((True, False), ("alarm", "trust"))
    cells = [counts.get(place, []) for place in places]
    return [share(sum(cell), len(cell)) for cell in cells]


# -------------------------------------------------------------------------------------------- fit

OPEN = Trust(opposed=1e-9, drifting=1e-9, boosted=1 + 1e-9)  # flags whatever it can
GRID: dict[str, tuple[Sequence[float], Callable[[Verdict, float], bool]]] = {
    "opposed": ((0.6, 0.8, 1.0, 1.2, 1.4), lambda v, at: v.agreement < -at),
    "drifting": ((3.0, 3.5, 4.0, 4.5, 5.0), lambda v, at: v.drift > at),
    "boosted": ((2.0, 2.5, 3.0, 4.0), lambda v, at: "boosted" in v.flags and v.length > at),
}


def fit(runs: Sequence[Judged]) -> None:
    """For every flag alone, what its thresholds find; `runs` are judged by OPEN."""
    for flag, (places, says) in GRID.items():
        print(f"\n`{flag}`:")
        rows: list[tuple[object, ...]] = []
        for at in places:
            cells = [
                " · ".join(cell.split(" (")[0] for cell in rates(own, _at(says, at))[:2])
                for attack, part in FORMS[1:]
                if part == 20
                for own in [chosen(runs, attack=attack, part=part)]
            ]
            small = [run for run in runs if run.setting.part <= 20]
            rows.append((at, *cells, rates(small, _at(says, at))[1]))
        table(("threshold", *(f"{a} 20 %" for a in ATTACKS), "false, up to 20 %"), rows)


def _at(says: Callable[[Verdict, float], bool], at: float) -> Says:
    return lambda verdict: says(verdict, at)


def main() -> None:
    parser = argparse.ArgumentParser(description="Does Trust find clients that attack?")
    parser.add_argument("--seeds", default="9,10,11,12,13", help="by default 9,10,11,12,13")
    parser.add_argument("--parts", default="10,20,40", help="percent of attackers, 10,20,40")
    parser.add_argument("--fit", action="store_true", help="what other thresholds find")
    parser.add_argument("--keep", type=Path, help="folder in which the runs are kept, and found")
    given = parser.parse_args()
    try:
        seeds, parts = ([int(n) for n in text.split(",")] for text in (given.seeds, given.parts))
    except ValueError:
        parser.error(f"--seeds {given.seeds} --parts {given.parts}: write numbers, as in 9,10,11")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts {given.parts}: choose of {', '.join(map(str, PARTS))}")
    trust, runs, opened = Trust(), list[Judged](), list[Judged]()
    for run in campaign(seeds, parts, given.keep):
        runs.append(judged(run, trust))
        if given.fit:
            opened.append(judged(run, OPEN))
    print(f"{machine()}; seeds {given.seeds}, {len(runs)} runs of {ROUNDS} rounds")
    print(f"{COHORT} of {CLIENTS} clients a round")
    if given.fit:
        fit(opened)
    measure(runs, trust)


if __name__ == "__main__":
    main()
