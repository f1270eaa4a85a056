"""The modules that the settings in `fedglad.models` build: here is torch, and there is none."""
