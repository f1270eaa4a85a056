"""One line of rounds.jsonl, checked: every field has its type, whatever the file has.

A line ends with two fields for its reader alone: `after`, the checksum of the whole line before it,
and `crc`, that of this line up to there. So a changed line shows, and one that was taken out.
"""

import json
import re
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import nan
from typing import Any, cast

from fedglad.core import checksums
from fedglad.records import FLAGS, METRIC, SHARES, Score
from fedglad.runs.scores import FIELD

# A terminal would obey them; the last two ranges turn the direction of the text that follows.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

LARGEST = 1e150
"""Numbers beyond it are taken for damage: their squares would overflow."""

ROUNDS = 1_000_000_000  # as round numbers go
METRICS = 1_000  # that are read of a round
ALARMS = ("one-sided", "outlier")
CLIENT_SCORES = ("client_scores", "averaged_client_scores")
NUMBERS = {
    "train_loss": (-LARGEST, LARGEST),
    "test_loss": (-LARGEST, LARGEST),
    "test_accuracy": (0.0, 1.0),
    "averaged_loss": (-LARGEST, LARGEST),
    "averaged_accuracy": (0.0, 1.0),
    "validation_loss": (-LARGEST, LARGEST),
    "validation_accuracy": (0.0, 1.0),
    "averaged_validation_loss": (-LARGEST, LARGEST),
    "averaged_validation_accuracy": (0.0, 1.0),
    "label_similarity": (0.0, 1.000001),
    "gsi_all": (1e-9, 1e9),
    "gsi_unfiltered": (1e-9, 1e9),
}
"""The range of each; a GSI is capped at 1000 where it is made."""


FIGURES = ("gsi", "baseline", "scale")
"""Of a group, in its record."""


class Groups(Mapping[str, dict[str, float | None]]):
    """The groups of a round as in its record, in a tenth of a dict's memory: 24 bytes a group.

    >>> groups = Groups({"a": {"gsi": 2.0, "baseline": None, "scale": 0.5}})
    >>> groups["a"], groups == {"a": {"gsi": 2.0, "baseline": None, "scale": 0.5}}
    ({'gsi': 2.0, 'baseline': None, 'scale': 0.5}, True)
    """

    def __init__(self, groups: Mapping[str, Mapping[str, float | None]]) -> None:
        self._place = _places(tuple(groups))
        given = (row[figure] for row in groups.values() for figure in FIGURES)
        self._values = array("d", (nan if value is None else value for value in given))

    def __getitem__(self, name: str) -> dict[str, float | None]:
        place = self._place[name] * len(FIGURES)
        values = self._values[place : place + len(FIGURES)]
        known = (None if value != value else value for value in values)
        return dict(zip(FIGURES, known, strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __repr__(self) -> str:
        return repr(dict(self))


@lru_cache(100)
def _places(names: tuple[str, ...]) -> dict[str, int]:
    """The place of each name, which all rounds of a run share."""
    return {name: place for place, name in enumerate(names)}


@dataclass
class Chain:
    """Reads, or writes, the lines of a file one after the other; counts those with a checksum."""

    before: bytes | None = b""  # the last line; None if it is damaged
    sealed: int = 0
    last_sealed: bool = True

    def write(self, record: dict[str, Any]) -> str:
        """The next line, without its end."""
        after = checksums.crc(self.before or b"")
        text = json.dumps({**record, "after": after}, allow_nan=False)
        line = checksums.json_with_crc(text)
        self.before = line.encode()
        return line

    def read(self, line: bytes) -> tuple[Any, str]:
        """What the next line holds, and what is wrong with it; empty if nothing is."""
        record, wrong = parse(line), ""
        before, self.before = self.before, line
        self.last_sealed = False
        if record is None:
            wrong = "is not JSON"
        elif isinstance(record, dict):
            record = cast(dict[str, Any], record)
            after = record.pop("after", None)
            if record.pop("crc", None) is not None:
                self.sealed, self.last_sealed = self.sealed + 1, True
                if checksums.verify(line) != "good":
                    wrong = "has a wrong checksum"
                elif before is not None and after != checksums.crc(before):
                    return record, NOT_NEXT
        if wrong:
            self.before = None
        return record, wrong


NOT_NEXT = "does not follow the line before it"
"""Of a line that is good by itself."""


def parse(line: bytes) -> Any:
    """JSON, or None for a line that is none."""
    try:
        return json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def clean(raw: Any) -> tuple[dict[str, Any], list[str]] | None:
    """A record with all its fields, and the names of those that could not be read.

    None for what is no record at all: a round needs its number. Fields that are not there are None
    or empty; `alarm`, `warning`, `score`, the average's and validation's are left out if they
    were, and so are further metrics of a task and the scores of single clients.
    """
    if not isinstance(raw, dict):
        return None
    given = cast(dict[str, Any], raw)
    t = given.get("round")
    if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < ROUNDS:
        return None
    bad: list[str] = []
    status, reason = given.get("status"), given.get("reason")
    status = _good(status, status in ("stepped", "skipped"), bad, "status") or "unknown"
    reason = _good(reason, isinstance(reason, str | None), bad, "reason")
    record: dict[str, Any] = {"round": t, "status": status, "reason": reason and text(reason)}
    for name, (low, high) in NUMBERS.items():
        # Those of the average and of validation are younger than the others.
        if name in given or not name.startswith(("averaged_", "validation_")):
            record[name] = _checked(given.get(name), low, high, bad, name)
    record |= _metrics(given, bad)
    if "score" in given:
        if (score := Score.read(given["score"])) is not None:
            record["score"] = score.to_dict()
        else:
            bad.append("score")
    for name in CLIENT_SCORES:
        if name in given and (scores := _client_scores(given[name], bad, name)):
            record[name] = scores
    record["clients"] = _clients(given.get("clients", []), bad)
    record["groups"] = _groups(given.get("groups", {}), bad)
    record["seconds"] = _seconds(given.get("seconds", {}), bad)
    if "bytes" in given and (sizes := _bytes(given["bytes"], bad)):
        record["bytes"] = sizes
    if "epsilon" in given:
        record["epsilon"] = _checked(given["epsilon"], 0.0, LARGEST, bad, "epsilon")
    if "alarm" in given:
        if given["alarm"] is None or given["alarm"] in ALARMS:
            record["alarm"] = given["alarm"]
        else:
            bad.append("alarm")
    if given.get("warning") is not None:
        if isinstance(given["warning"], str):
            record["warning"] = text(given["warning"])
        else:
            bad.append("warning")
    return record, bad


def number(value: Any, low: float = -LARGEST, high: float = LARGEST) -> float | None:
    """A number in the range; None for anything else, NaN too."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # Compared as it is: an int may be too large for a float.
    return float(value) if low <= value <= high else None


def by_design(reason: str | None) -> bool:
    """Whether a filter or a weighting left this update out: nothing is wrong with it."""
    return reason is not None and reason.startswith("left out by ")


def text(value: str, limit: int = 200) -> str:
    """What can be shown: no half of a surrogate pair, no control characters, not endless."""
    if value.isascii() and value.isprintable() and len(value) <= limit:
        return value
    whole = _CONTROL.sub("�", value[: limit + 1].encode("utf-8", "replace").decode("utf-8"))
    return whole if len(whole) <= limit else f"{whole[: limit - 1]}…"


def _good(value: Any, good: bool, bad: list[str], field: str) -> Any:
    """The value, if it is good; else None, and the field is a bad one."""
    if not good:
        bad.append(field)
    return value if good else None


def _checked(value: Any, low: float, high: float, bad: list[str], field: str) -> float | None:
    """The number; what is there and is none makes the field a bad one."""
    checked = number(value, low, high)
    if checked is None and value is not None:
        bad.append(field)
    return checked


def _metrics(given: dict[str, Any], bad: list[str]) -> dict[str, float | None]:
    """Those of a task beside loss and accuracy; of endlessly many, the first."""
    names = [name for name in given if name not in NUMBERS and FIELD.fullmatch(name)]
    if len(names) > METRICS:
        bad.append("metrics")
    metrics: dict[str, float | None] = {}
    for name in names[:METRICS]:
        low, high = (0.0, 1.0) if name.endswith(SHARES) else (-LARGEST, LARGEST)
        metrics[name] = _checked(given[name], low, high, bad, name)
    return metrics


def _client_scores(raw: Any, bad: list[str], field: str) -> dict[str, Any] | None:
    """How many clients were tested, and the figures of their scores; None for what is none."""
    given = cast(dict[str, Any], raw) if isinstance(raw, dict) else {}
    count, name = given.get("count"), given.get("score", "")
    if not _whole(count) or not isinstance(name, str) or not METRIC.fullmatch(name or "score"):
        bad.append(field)
        return None
    kept: dict[str, Any] = {**({"score": name} if name else {}), "count": count}
    if "model" in given:
        kept["model"] = _good(given["model"], given["model"] == "personal", bad, field)
    if "left_out" in given:
        kept["left_out"] = _good(given["left_out"], _whole(given["left_out"]), bad, field)
    low, high = (0.0, 1.0) if name.endswith(SHARES) else (-LARGEST, LARGEST)
    for key in ("mean", "worst_decile", "std"):
        kept[key] = _checked(given.get(key), 0.0 if key == "std" else low, high, bad, field)
    return kept


def _whole(value: Any) -> bool:
    """Whether it is a number of things, as far as a browser can count."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _clients(raw: Any, bad: list[str]) -> list[dict[str, Any]]:
    clients: list[dict[str, Any]] = []
    for item in _good(raw, isinstance(raw, list), bad, "clients") or []:
        if (one := _good(item, isinstance(item, dict), bad, "clients")) is None:
            continue
        client: dict[str, Any] = {"id": client_id(one.get("id"))}
        for name, low in (("weight", 0.0), ("loss", -LARGEST), ("sq_norm", 0.0)):
            client[name] = _checked(one.get(name), low, LARGEST, bad, "clients")
        if (why := one.get("rejected")) is not None:
            client["rejected"] = text(why) if isinstance(why, str) else "the reason is damaged"
            bad += [] if isinstance(why, str) else ["clients"]
        for name in ("trust", "clipped"):
            if (share := _checked(one.get(name), 0.0, 1.0, bad, "clients")) is not None:
                client[name] = share
        if flags := _flags(one.get("flags", []), bad):
            client["flags"] = flags
        if client["id"] is None and one.get("id") is not None:
            bad.append("clients")
        clients.append(client)
    return clients


def _flags(raw: Any, bad: list[str]) -> list[str]:
    """Those that are known, each once."""
    given = cast(list[Any], raw) if isinstance(raw, list) else [raw]
    known = [flag for flag in FLAGS if flag in given]
    if len(known) < len(given):
        bad.append("clients")
    return known


def client_id(raw: Any) -> int | str | None:
    """Who a client is; None for what is no id."""
    if isinstance(raw, str):
        return sys.intern(text(raw, 100))
    if isinstance(raw, int) and not isinstance(raw, bool) and abs(raw) < 2**128:
        return raw if abs(raw) < 2**53 else str(raw)  # as far as a browser can count
    return None


def _groups(raw: Any, bad: list[str]) -> dict[str, dict[str, float | None]]:
    groups: dict[str, dict[str, float | None]] = {}
    for name, item in (_good(raw, isinstance(raw, dict), bad, "groups") or {}).items():
        group = cast(dict[str, Any], item) if isinstance(item, dict) else {}
        scale = number(group.get("scale"))
        if scale is None:
            bad.append("groups")
            continue
        gsi, baseline = (
            _checked(group.get(key), 1e-9, 1e9, bad, "groups") for key in ("gsi", "baseline")
        )
        groups[sys.intern(text(name))] = {"gsi": gsi, "baseline": baseline, "scale": scale}
    return groups


def _bytes(raw: Any, bad: list[str]) -> dict[str, int] | None:
    """How many went to a cohort and came from it; None for what is no such pair."""
    given = cast(dict[str, Any], raw) if isinstance(raw, dict) else {}
    sizes = {name: given.get(name) for name in ("down", "up")}
    if all(_whole(size) for size in sizes.values()):
        return cast(dict[str, int], sizes)
    bad.append("bytes")
    return None


def _seconds(raw: Any, bad: list[str]) -> dict[str, float]:
    parts = (_good(raw, isinstance(raw, dict), bad, "seconds") or {}).items()
    known = {text(name): _checked(value, 0.0, LARGEST, bad, "seconds") for name, value in parts}
    return {name: value for name, value in known.items() if value is not None}
