"""A Flower app for benchmarks/flower.py."""
