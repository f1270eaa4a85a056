"""`python -m fedglad` is the command `fedglad`."""

import sys

if __name__ == "__main__":
    if __spec__ and __spec__.name == "fedglad.__main__" and not sys.flags.safe_path:
        del sys.path[0]  # the working folder, where `python -m` looks for modules first

    from fedglad.cli import app

    app(prog_name="fedglad")
