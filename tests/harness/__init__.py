"""A pool of persistent rank processes for pytest, and what a multi-rank test needs around it.

``ranks`` turns a plain test function into one whose body runs on every rank; ``RankPool.run`` sends any importable
function to the ranks and hands back what each of them returned; ``count_collectives`` counts traffic by process group.
"""

from tests.harness.collectives import CollectiveCall, CollectiveLog, count_collectives
from tests.harness.decorator import ranks
from tests.harness.pool import RankPool
from tests.harness.report import RankFailure

__all__ = ["CollectiveCall", "CollectiveLog", "RankFailure", "RankPool", "count_collectives", "ranks"]
