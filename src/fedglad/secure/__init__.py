"""Secure aggregation: clients' vectors are added up by a server that sees nothing but their sum.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(arXiv:1611.04482), against a server that is curious and keeps to the protocol. `SecureClient`
and `Round` are the two roles, without a network: dicts go in and come out. Imports NumPy and
cryptography alone, so that clients need no torch; anything may import it.
"""

from fedglad.secure.client import SecureClient
from fedglad.secure.fixed import FixedPoint, Refused
from fedglad.secure.server import Round, SecureSum, TooFew, Total

__all__ = ["FixedPoint", "Refused", "Round", "SecureClient", "SecureSum", "TooFew", "Total"]
