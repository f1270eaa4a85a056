"""What a finished run came to: summary.json."""

import math
import os
import platform
from importlib.metadata import version
from typing import Any

from fedglad.config.schema import FORMAT


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a finished run; a figure that was never measured is None."""
    tested = [r["test_accuracy"] for r in rounds if r["test_accuracy"] is not None]
    return {
        "last10_accuracy": math.fsum(tested[-10:]) / len(tested[-10:]) if tested else None,
        "final_accuracy": tested[-1] if tested else None,
        "rounds": len(rounds),
        "skipped": sum(r["status"] == "skipped" for r in rounds),
        "seconds": math.fsum(s for r in rounds for s in r["seconds"].values()),
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "numpy": version("numpy"),
            "format": FORMAT,
        },
        "machine": machine(),
    }


def machine() -> str:
    """What kind of machine this is."""
    return f"{platform.machine()}, {os.cpu_count()} cores"
