"""FedGLAD inside Flower: its strategy, and real federations on this machine."""
