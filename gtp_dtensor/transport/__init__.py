"""How bytes move between the ranks of a gtp axis."""

from .choice import choose_transport
from .collective import CollectiveTransport, Traffic, Transfer
from .symmetric import SUMMED_DTYPES, Ticket

__all__ = ["SUMMED_DTYPES", "CollectiveTransport", "Ticket", "Traffic", "Transfer", "choose_transport"]
