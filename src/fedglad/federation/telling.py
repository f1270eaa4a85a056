"""Who hears of each round while a federation trains: functions, a log of JSON, Prometheus."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedglad.federation.session import Session
    from fedglad.report.metrics import Metrics

Record = Mapping[str, Any]
Hear = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, kw_only=True)
class Tell:
    """Who is told of each round.

    | argument | meaning |
    |---|---|
    | `on_round` | called with the record of every round, once it is saved |
    | `on_alarm` | called with that of a round that is distrusted or was skipped |
    | `json` | a line of JSON a round in the log: what is one number or text of its record |
    | `metrics` | the port where Prometheus finds /metrics; 0: any; None: nowhere |
    | `host` | where that is listened on; from other machines anybody can read it |

    What a function raises is a warning in the log: training goes on.

    >>> told = []
    >>> with Tell(on_alarm=told.append).telling(session=None) as tell:
    ...     tell({"round": 0, "status": "stepped", "alarm": None})
    ...     tell({"round": 1, "status": "stepped", "alarm": "outlier"})
    >>> [record["round"] for record in told]
    [1]
    """

    on_round: Hear | None = None
    on_alarm: Hear | None = None
    json: bool = False
    metrics: int | None = None
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.metrics is not None and not 0 <= self.metrics < 65536:
            raise ValueError(f"metrics={self.metrics!r}: a port is a number from 0 to 65535")

    @contextmanager
    def telling(
        self, session: Session | None, before: Iterable[Record] = ()
    ) -> Generator[Callable[[dict[str, Any]], None]]:
        """What is called with each round's record; `before` are those that are there already."""
        with ExitStack() as stack:
            scraped = None
            if self.metrics is not None and session is not None:
                scraped = stack.enter_context(_served(self.host, self.metrics, session))
                for record in before:
                    scraped.add(record)

            def tell(record: dict[str, Any]) -> None:
                if scraped:
                    scraped.add(record)
                if self.json and session is not None:
                    session.info("%s", line(record))
                alarmed = bool(record.get("alarm")) or record.get("status") == "skipped"
                for name, hear in (("on_round", self.on_round), ("on_alarm", self.on_alarm)):
                    if hear and (alarmed or name == "on_round"):
                        try:
                            hear(record)
                        except Exception as error:
                            if session is not None:
                                session.warn("%s failed: %r", name, error)

            yield tell


def line(record: Record) -> str:
    """What is one number or text of a record, with how many clients were asked and accepted.

    >>> line({"round": 3, "status": "stepped", "groups": {}, "clients": [{}, {"rejected": "late"}]})
    '{"round": 3, "status": "stepped", "cohort": 2, "accepted": 1}'
    """
    plain = {k: v for k, v in record.items() if v is None or isinstance(v, str | int | float)}
    clients = record.get("clients") or ()
    accepted = sum("rejected" not in client for client in clients)
    return json.dumps({**plain, "cohort": len(clients), "accepted": accepted})


class _Scraped:
    """Metrics that one thread adds to and another one reads."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._lock = metrics, Lock()

    def add(self, record: Record) -> None:
        with self._lock:
            self._metrics.add(record)

    def collect(self) -> Iterable[Any]:
        with self._lock:
            return [*self._metrics.collect()]


@contextmanager
def _served(host: str, port: int, session: Session) -> Generator[_Scraped]:
    """Serves /metrics by prometheus-client, while the block runs."""
    from fedglad.report.metrics import Metrics, serving

    scraped = _Scraped(Metrics())
    with serving(scraped, host, port) as bound:
        session.info("Metrics for Prometheus: http://%s:%d/metrics", host, bound)
        yield scraped
