"""Contracts over every registry row: a new method is covered by having a row."""
