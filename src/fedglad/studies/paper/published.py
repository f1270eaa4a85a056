"""The numbers of the paper's tables: test accuracy in percent, mean ± sample deviation of 3 seeds.

A row that ends in + is the method with FedGLAD.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedglad.studies.paper.settings import ALPHAS, DATA

Key = tuple[str | float | bool, ...]


@dataclass(frozen=True)
class Value:
    """A published mean, with its deviation where there is one."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Published:
    """A table: its number, its label in the LaTeX source, and its values.

    Keys are (method, with FedGLAD, …columns), with the data set first where rows belong to one.
    """

    number: int
    label: str
    values: Mapping[Key, Value]

    def of(self, *key: str | float | bool) -> Value:
        """One value."""
        return self.values[key]


def _read(text: str) -> Value:
    mean, _, std = text.partition("±")
    return Value(float(mean), float(std) if std else None)


def _rows(text: str, columns: Sequence[Key], before: Key = ()) -> Iterator[tuple[Key, Value]]:
    for line in text.strip().splitlines():
        method, *cells = line.split()
        for column, cell in zip(columns, cells, strict=True):
            key = (*before, method.rstrip("+"), method.endswith("+"), *column)
            yield key, _read(cell)


def _blocks(texts: Mapping[str, str], columns: Sequence[Key]) -> dict[Key, Value]:
    """Rows by data set."""
    return {
        key: value
        for name, text in texts.items()
        for key, value in _rows(text, columns, before=(name,))
    }


_BY_DATA: list[Key] = [(name,) for name in DATA]
_BY_SEED: list[Key] = [(seed,) for seed in (1, 2, 3)]

MAIN = {
    0.1: Published(
        1,
        "tab: main results",
        dict(
            _rows(
                """
FedAvg   35.30±1.62  78.17±0.35  72.84±0.12  79.48±0.46
FedAvg+  38.44±0.91  79.71±0.49  73.14±0.08  80.74±0.79
FedProx  43.48±0.79  82.72±0.25  72.78±0.20  82.61±0.56
FedProx+ 44.52±0.72  83.54±0.34  73.19±0.08  83.44±0.44
FedAvgM  48.79±1.35  81.71±0.99  75.44±0.10  80.28±1.75
FedAvgM+ 50.91±1.33  82.11±0.64  75.91±0.29  83.68±0.87
FedAdam  56.82±1.12  96.94±0.14  76.76±1.17  86.72±1.02
FedAdam+ 57.69±1.23  97.11±0.11  76.59±0.81  88.47±0.51
""",
                _BY_DATA,
            )
        ),
    ),
    1.0: Published(
        7,
        "tab: main results alpha=1.0",
        dict(
            _rows(
                """
FedAvg   72.09±1.27  91.42±0.11  76.66±0.36  91.27±0.04
FedAvg+  72.79±1.13  91.63±0.08  77.21±0.42  91.38±0.04
FedProx  71.22±0.83  91.68±0.05  76.51±0.47  91.24±0.09
FedProx+ 71.52±0.61  91.86±0.06  77.13±0.17  91.35±0.09
FedAvgM  72.63±0.56  93.37±0.29  79.51±0.31  90.07±0.27
FedAvgM+ 73.07±0.33  93.97±0.26  79.77±0.08  90.45±0.42
FedAdam  79.97±1.30  98.42±0.08  79.96±0.12  91.72±0.12
FedAdam+ 80.75±1.35  98.53±0.04  80.13±0.20  91.81±0.10
""",
                _BY_DATA,
            )
        ),
    ),
}
"""By α; keys (method, with FedGLAD, data set)."""

RATIOS = Published(
    2,
    "tab: different sampling ratios",
    _blocks(
        {
            "cifar10": """
FedAvg   29.91 35.30 52.05
FedAvg+  33.35 38.44 53.40
FedAvgM  34.72 48.79 63.56
FedAvgM+ 36.48 50.91 63.84
""",
            "20news": """
FedAvg   63.09 72.84 76.31
FedAvg+  63.49 73.14 76.35
FedAvgM  61.51 75.44 80.08
FedAvgM+ 62.48 75.91 79.98
""",
        },
        [(5,), (10,), (20,)],
    ),
)
"""Keys (data set, method, with FedGLAD, clients a round)."""

STRATEGIES = Published(
    3,
    "tab: various sampling strategies",
    _blocks(
        {
            "cifar10": """
FedAvg   41.44 39.85
FedAvg+  42.20 41.39
FedAvgM  51.77 52.76
FedAvgM+ 53.85 53.68
""",
            "20news": """
FedAvg   73.36 72.14
FedAvg+  74.04 72.92
FedAvgM  75.22 76.18
FedAvgM+ 75.60 76.40
""",
        },
        [("md",), ("adafl",)],
    ),
)
"""Keys (data set, method, with FedGLAD, sampler)."""

NORM_RATIO = Published(
    4,
    "tab: impact on scale component",
    {
        (name, alpha, epochs): Value(value)
        for name, rows in {
            "cifar10": {0.1: (0.24, 0.29, 0.33), 1.0: (0.23, 0.19, 0.15)},
            "20news": {0.1: (0.12, 0.15, 0.16), 1.0: (0.08, 0.15, 0.15)},
        }.items()
        for alpha, row in rows.items()
        for epochs, value in zip((1, 3, 5), row, strict=True)
    },
)
"""Keys (data set, α, local epochs): std/mean of squared norms, mean over the rounds."""

CENTRALISED = Published(
    6,
    "tab: centralized results",
    dict(
        zip(
            _BY_DATA,
            map(_read, ["91.86±0.49", "99.26±0.04", "84.12±0.05", "93.43±0.07"]),
            strict=True,
        )
    ),
)
"""Keys (data set,)."""

SCAFFOLD = Published(
    8,
    "tab: results on scaffold",
    dict(
        _rows(
            """
SCAFFOLD  76.22±0.63 77.14±0.39 77.43±0.99 91.08±0.15 86.02±0.64 87.93±0.30
SCAFFOLD+ 76.88±0.48 78.46±0.30 81.42±1.48 91.17±0.16 86.06±0.88 87.91±0.29
""",
            [(name, alpha) for name in ("20news", "agnews", "mnist") for alpha in ALPHAS],
        )
    ),
)
"""Keys (method, with FedGLAD, data set, α)."""

BILSTM = Published(
    9,
    "tab: results on bilstm",
    dict(
        _rows(
            """
Centralized 78.28±0.94 91.47±0.16
FedAvg      36.25±0.46 69.84±0.29
FedAvg+     37.37±0.40 70.64±0.24
FedAvgM     35.54±0.64 71.36±1.29
FedAvgM+    35.91±0.67 73.50±1.40
""",
            [("20news",), ("agnews",)],
        )
    ),
)
"""Keys (method, with FedGLAD, data set)."""

EPOCHS = Published(
    10,
    "tab: different local epochs",
    dict(
        _rows(
            """
FedAvg   52.23±1.78 58.31±1.59 82.71±0.68 86.13±0.40
FedAvg+  53.81±0.56 59.02±1.13 84.25±0.33 87.47±0.35
FedAvgM  53.28±1.86 56.59±1.50 83.15±2.63 86.20±2.55
FedAvgM+ 55.55±0.24 58.35±1.04 82.71±2.64 86.68±2.68
""",
            [(name, epochs) for name in ("cifar10", "mnist") for epochs in (10, 20)],
        )
    ),
)
"""Keys (method, with FedGLAD, data set, local epochs)."""

SEEDS = {
    0.1: Published(
        11,
        "tab: each seed result alpha=0.1",
        _blocks(
            {
                "cifar10": """
FedAvg   37.08 33.90 34.91
FedAvg+  39.49 38.02 37.82
FedAvgM  47.24 49.38 49.76
FedAvgM+ 49.40 51.91 51.42
""",
                "mnist": """
FedAvg   78.29 77.77 78.44
FedAvg+  79.20 79.75 80.19
FedAvgM  80.68 82.65 81.79
FedAvgM+ 81.68 82.84 81.81
""",
                "20news": """
FedAvg   72.72 72.96 72.84
FedAvg+  73.13 73.22 73.06
FedAvgM  75.39 75.38 75.56
FedAvgM+ 76.02 76.12 75.58
""",
                "agnews": """
FedAvg   78.95 79.78 79.72
FedAvg+  79.83 81.29 81.11
FedAvgM  82.25 79.67 78.91
FedAvgM+ 84.22 84.14 82.67
""",
            },
            _BY_SEED,
        ),
    ),
    1.0: Published(
        12,
        "tab: each seed result alpha=1.0",
        _blocks(
            {
                "cifar10": """
FedAvg   73.20 70.70 72.36
FedAvg+  74.07 71.91 72.39
FedAvgM  72.18 72.44 73.26
FedAvgM+ 72.70 73.18 73.32
""",
                "mnist": """
FedAvg   91.48 91.30 91.49
FedAvg+  91.70 91.55 91.65
FedAvgM  93.55 93.52 93.04
FedAvgM+ 94.06 94.17 93.67
""",
                "20news": """
FedAvg   76.57 76.35 77.06
FedAvg+  77.53 76.74 77.37
FedAvgM  79.51 79.20 79.82
FedAvgM+ 79.80 79.68 79.83
""",
                "agnews": """
FedAvg   91.26 91.31 91.23
FedAvg+  91.38 91.41 91.34
FedAvgM  90.28 89.77 90.17
FedAvgM+ 90.82 89.99 90.53
""",
            },
            _BY_SEED,
        ),
    ),
}
"""By α; keys (data set, method, with FedGLAD, seed), counted as the paper does."""

SIMILARITY = Value(0.4753)
"""Pearson's r of GSI and label similarity over the rounds of CIFAR-10, in the text."""
