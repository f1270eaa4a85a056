"""Data sets; known to the configuration alone: no other part of fedglad may import them."""
