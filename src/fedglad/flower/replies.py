"""A Flower reply as an Update, and what is wrong with one that cannot be."""

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedglad.core.validate import as_number
from fedglad.flower.mods import NORMS
from fedglad.flower.transport import REFUSED, Found

UNREACHABLE = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE)
LONGEST = 500  # letters that are kept of a client's error, or that the name of a metric may have

Record = TypeVar("Record", ArrayRecord, MetricRecord)
Reply = tuple[MetricRecord, RecordDict]
"""Its metrics; and all but arrays and norms, as the user's functions expect it."""


class Unusable(Exception):
    """A reply that is no update; the message is the reason kept in the record."""


def is_gone(message: Found) -> bool:
    """Whether its node cannot be reached."""
    if isinstance(message, str):
        return message == REFUSED
    return message.has_error() and message.error.code in UNREACHABLE


def why_not(message: Found) -> str:
    """Why there is no reply; empty if there is one."""
    if isinstance(message, str):
        return message
    if message.has_error():
        reason = str(message.error.reason or message.error.code)[:LONGEST]
        return f"the client failed: {reason}"
    return ""


def read(message: Found) -> Reply:
    """The reply without its arrays; raises Unusable if there is none, and why, or no metrics."""
    if isinstance(message, str) or message.has_error():
        raise Unusable(why_not(message))
    rest = RecordDict()
    for name, record in message.content.items():
        if isinstance(record, MetricRecord) and NORMS in record:
            record = MetricRecord({k: v for k, v in record.items() if k != NORMS})
        if not isinstance(record, ArrayRecord):
            rest[name] = record
    return only(message.content, MetricRecord), rest


def only(content: RecordDict, kind: type[Record]) -> Record:
    """The one record of a kind.

    Not by `content.array_records`: that makes a cycle, and the arrays would live until it is found.
    """
    records = [record for record in content.values() if isinstance(record, kind)]
    if len(records) != 1:
        raise Unusable(f"the reply has {len(records)} {kind.__name__}s: one is expected")
    return records[0]


def weight_of(metrics: MetricRecord, key: str) -> float:
    """The client's weight; raises Unusable unless it is there, and one positive number."""
    if key not in metrics:
        raise Unusable(f"there is no weight: the MetricRecord has no {key!r}")
    value = metrics[key]
    if isinstance(value, list) or (number := as_number(value)) is None or number <= 0:
        shown = str(value)[:40]
        raise Unusable(f"the weight {key!r} is {shown}, not a positive finite number")
    return number


def decoded(record: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """The arrays by name, without a copy; raises Unusable if one cannot be read."""
    arrays: dict[str, np.ndarray] = {}
    for name, array in record.items():
        try:
            arrays[name] = _view(array)
        except Exception as error:  # a header is parsed as Python, and fails in as many ways
            raise Unusable(f"the array {name[:200]!r} cannot be read: {error!s:.200}") from None
    return arrays


def _view(array: Array) -> np.ndarray:
    """What `Array.numpy` gives, as a view of its bytes."""
    if array.stype != "numpy.ndarray":
        raise ValueError(f"it is serialised as {array.stype!r}")
    stream = io.BytesIO(array.data)
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        header = np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    count = math.prod(shape)
    if stream.tell() + count * dtype.itemsize > len(array.data):
        raise ValueError("it is cut off")
    flat = np.frombuffer(array.data, dtype, count, stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


def mean_metrics(contents: list[RecordDict], key: str) -> MetricRecord:
    """The mean of each metric by `key`, over those clients that reported it.

    As Flower's `aggregate_metricrecords`, which needs the same metrics of all. One that is a list
    here and a number there has no mean, nor has one whose name is too long to be kept.
    """
    reported: dict[str, list[tuple[Any, float]]] = {}
    for metrics in (only(content, MetricRecord) for content in contents):
        for name, value in metrics.items():
            if len(name) > LONGEST:
                continue
            reported.setdefault(name, []).append((value, float(cast(float, metrics[key]))))
    del reported[key]
    means = MetricRecord()
    for name, pairs in reported.items():
        values, weights = [np.asarray(value, float) for value, _ in pairs], [w for _, w in pairs]
        if len({value.shape for value in values}) == 1:
            means[name] = np.average(values, axis=0, weights=weights).tolist()
    return means


def rounds_of(
    records: Iterable[Mapping[str, Any]], part: str, first: int = 1
) -> Iterator[tuple[int, MetricRecord]]:
    """The metrics of recorded rounds, by Flower's count, which begins at 1."""

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read(entry) for entry in value]
        return math.nan if value is None else value

    for record in records:
        if part in record.get("metrics", {}):
            metrics = {name: read(value) for name, value in record["metrics"][part].items()}
            yield record["round"] + first, MetricRecord(metrics)
