"""Secure aggregation: clients' vectors are added up by a server that sees nothing but their sum.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(arXiv:1611.04482), against a server that is curious and keeps to the protocol. `SecureClient`
and `Round` are the two roles, without a network: dicts go in and come out. Needs NumPy and
cryptography alone, so that clients need no torch. Knows `core.lazy`; `flower` uses it.
"""

from typing import TYPE_CHECKING

from fedglad.core.lazy import lazily

if TYPE_CHECKING:
    from fedglad.secure.client import SecureClient as SecureClient
    from fedglad.secure.fixed import FixedPoint as FixedPoint
    from fedglad.secure.fixed import Refused as Refused
    from fedglad.secure.server import Round as Round
    from fedglad.secure.server import SecureSum as SecureSum
    from fedglad.secure.server import TooFew as TooFew
    from fedglad.secure.server import Total as Total

__all__ = ["FixedPoint", "Refused", "Round", "SecureClient", "SecureSum", "TooFew", "Total"]

LACKING = {"cryptography": "cryptography: pip install 'fedglad[secure]'"}

__getattr__, __dir__ = lazily(__name__, LACKING)
