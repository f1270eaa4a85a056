"""A run's rounds as metrics in the OpenMetrics format, for Prometheus and what reads the same.

    metrics = Metrics()
    metrics.add(record)  # a line of rounds.jsonl
    metrics.text()  # what `fedglad watch` answers at /metrics

Counters count from the run's first round, also after a restart: they are read from its records.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

from fedglad.report import ReportError

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
REASON = 80  # characters of a reason; numbers in it are left out, or each would be another series
CLIENTS = 1000  # whose series there are: those seen last
_NUMBER = re.compile(r"\d[\d.,e+-]*")


class Metrics:
    """What is known after the rounds that were added so far.

    >>> metrics = Metrics()
    >>> metrics.add({"round": 0, "status": "stepped", "gsi_all": 1.5, "clients": []}, at=12.0)
    >>> "fedglad_gsi 1.5" in metrics.text()
    True
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.statuses: Counter[str] = Counter()
        self.alarms: Counter[str] = Counter()
        self.rejected: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.replied: dict[str, float] = {}  # clients in the order in which they replied, and when
        self.trust: dict[str, float] = {}
        self.success: float | None = None
        self.last: Mapping[str, Any] = {}
        self.scores: dict[tuple[str, str], float] = {}  # the last of each (metric, model)

    def add(self, record: Mapping[str, Any], at: float | None = None) -> None:
        """A round's record, and when it was written; by default now."""
        at = time.time() if at is None else at
        self.rounds, self.last = int(record["round"]) + 1, record
        status = str(record.get("status"))
        self.statuses[status] += 1
        if status == "stepped":
            self.success = at
        if alarm := record.get("alarm"):
            self.alarms[str(alarm)] += 1
        for part, count in (record.get("bytes") or {}).items():
            self.bytes[part] += count
        for part, count in (record.get("seconds") or {}).items():
            self.seconds[part] += count
        for entry in record.get("clients") or ():
            self._add_client(entry, at)
        for name, value in record.items():
            model, _, metric = name.partition("_")
            if model in ("test", "averaged") and metric and _is_number(value):
                self.scores[metric, "newest" if model == "test" else model] = value

    def _add_client(self, entry: Mapping[str, Any], at: float) -> None:
        client = str(entry.get("id"))
        if reason := entry.get("rejected"):
            self.rejected[client, _NUMBER.sub("#", str(reason))[:REASON]] += 1
        else:
            self.replied.pop(client, None)
            self.replied[client] = at
        if _is_number(trust := entry.get("trust")):
            self.trust[client] = float(trust)
        for old in list(self.replied)[:-CLIENTS]:
            self.replied.pop(old)
            self.trust.pop(old, None)

    def text(self) -> str:
        """All of it, as a scraper takes it."""
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.openmetrics.exposition import generate_latest
        except ImportError as error:
            raise ReportError(_lacking(error)) from None
        registry = CollectorRegistry()
        registry.register(self)  # pyright: ignore[reportArgumentType]
        return generate_latest(registry).decode()

    def collect(self) -> Iterable[Any]:
        """The families, as prometheus-client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def family(kind: Any, name: str, about: str, labels: Iterable[str] = ()) -> Any:
            return kind(f"fedglad_{name}", about, labels=list(labels))

        def gauge(name: str, about: str, value: Any) -> Iterable[Any]:
            if _is_number(value):
                one = family(GaugeMetricFamily, name, about)
                one.add_metric([], value)
                yield one

        last = self.last
        yield from gauge("round", "Rounds so far, skipped ones too.", self.rounds)
        when = "When a round last stepped, in seconds since 1970."
        yield from gauge("last_success_timestamp_seconds", when, self.success)
        yield from gauge("gsi", "How much the last cohort disagreed.", last.get("gsi_all"))
        scales = [group["scale"] for group in (last.get("groups") or {}).values()]
        yield from gauge("factor_min", "The smallest factor of a group.", min(scales, default=None))
        yield from gauge("factor_max", "The largest factor of a group.", max(scales, default=None))
        cohort = len(last.get("clients") or ())
        yield from gauge("cohort", "Clients that were asked in the last round.", cohort)
        accepted = sum("rejected" not in entry for entry in last.get("clients") or ())
        yield from gauge("accepted", "Updates that were accepted in it.", accepted)
        yield from gauge("train_loss", "The mean of its clients' losses.", last.get("train_loss"))

        score = family(GaugeMetricFamily, "score", "What a test last gave.", ("metric", "model"))
        for (metric, model), value in self.scores.items():
            score.add_metric([metric, model], value)
        yield score
        counters: list[tuple[str, str, str, Mapping[str, float]]] = [
            ("rounds", "Rounds by how they ended.", "status", self.statuses),
            ("alarms", "Rounds that were distrusted, by why.", "kind", self.alarms),
            ("bytes", "What travelled, by direction.", "direction", self.bytes),
            ("seconds", "Time that was spent, by what on.", "part", self.seconds),
        ]
        for name, about, label, counts in counters:
            counter = family(CounterMetricFamily, name, about, (label,))
            for value, count in counts.items():
                counter.add_metric([value], count)
            yield counter
        lost = "Updates that were left out, by client and reason."
        rejected = family(CounterMetricFamily, "rejected", lost, ("client", "reason"))
        for (client, reason), count in self.rejected.most_common(CLIENTS):
            rejected.add_metric([client, reason], count)
        yield rejected
        trust = family(GaugeMetricFamily, "client_trust", "The last trust score.", ("client",))
        for client, value in self.trust.items():
            trust.add_metric([client], value)
        yield trust
        about = "When a client's update was last accepted, in seconds since 1970."
        replied = family(
            GaugeMetricFamily, "client_last_reply_timestamp_seconds", about, ("client",)
        )
        for client, at in self.replied.items():
            replied.add_metric([client], at)
        yield replied


@contextmanager
def serving(collector: Any, host: str, port: int) -> Generator[int]:
    """Serves what `collector.collect()` gives at /metrics, while the block runs; gives the port."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ReportError(_lacking(error)) from None
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ReportError(
            f"port {port} of {host} cannot be used for metrics: {error.strerror}; choose another"
        ) from None
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _lacking(error: ImportError) -> str:
    return f'metrics need the package prometheus-client ({error}): pip install "fedglad[metrics]"'


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
