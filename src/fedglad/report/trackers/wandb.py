"""Weights & Biases, offline: files that `wandb sync` may send later, if the user wants to."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from fedglad.report.trackers.names import Row, Start

PROJECT = "fedglad"
QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",  # crash reports, set up when it is imported
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_CODE": "true",
}


class Wandb:
    """OUT/wandb/offline-run-…-ID, written anew each time; nothing is sent."""

    shown = "W&B"
    errors: ClassVar[tuple[type[Exception], ...]] = ()
    _alone: ClassVar[bool] = False  # nobody else in this process uses the library
    _open: ClassVar[int] = 0

    def __init__(self, start: Start) -> None:
        wandb = self.load()
        for old in (start.out / "wandb").glob(f"offline-run-*-{start.id}"):
            shutil.rmtree(old)
        settings = wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            symlink=False,
            host="-",
        )
        self._run: Any = wandb.init(
            project=PROJECT,
            name=start.name,
            id=start.id,
            dir=str(start.out),
            config=start.config,
            reinit="create_new",
            settings=settings,
        )
        self._folder = Path(self._run.dir).parent
        Wandb._open += 1

    @staticmethod
    def load() -> Any:
        """The library, set before it is loaded so that it sends nothing."""
        os.environ.update(QUIET)
        Wandb._alone |= "wandb" not in sys.modules
        wandb = import_module("wandb")
        Wandb.errors = (wandb.Error,)
        return wandb

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(row.scalars, step=row.step)

    def close(self, summary: dict[str, float] | None, step: int) -> None:
        if summary:
            self._run.summary.update(summary)
        self._run.finish(exit_code=0)
        Wandb._open -= 1
        wandb = self.load()
        if Wandb._alone and not Wandb._open and wandb.run is None:
            wandb.teardown()  # waits until the file is complete, which finish does not

    @property
    def command(self) -> str:
        return f"wandb sync {shlex.quote(str(self._folder))}"
