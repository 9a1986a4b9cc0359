"""How bytes move between the ranks of a gtp axis."""

from .collective import CollectiveTransport, Transfer

__all__ = ["CollectiveTransport", "Transfer"]
