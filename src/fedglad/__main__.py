"""`python -m fedglad` is the command `fedglad`."""

from fedglad.cli import app

if __name__ == "__main__":
    app(prog_name="fedglad")
