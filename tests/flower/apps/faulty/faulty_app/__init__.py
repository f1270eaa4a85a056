"""Clients that fail on demand."""
