"""A temporary folder that goes with its process, also if that is killed."""

import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import rmtree

from fedglad.core.cluster import KEEPER

# What kills a process may kill its children too: the keeper is nobody's child.
DETACHED = f"import os\nif os.fork():\n    os._exit(0)\n{KEEPER}"


class Scratch:
    """The folder; `close` removes it at once."""

    def __init__(self, prefix: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=prefix))
        command = [sys.executable, "-S", "-c", DETACHED, str(self.folder)]
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._keeper.wait()  # from here on it is the system's

    def close(self) -> None:
        """Nobody may write into it any more."""
        rmtree(self.folder, ignore_errors=True)
        if self._keeper.stdin:
            self._keeper.stdin.close()
