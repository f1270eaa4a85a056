"""A Flower app: see task.py for the model and the data."""
