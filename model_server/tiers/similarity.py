"""Decides whether a few heads can stand for all heads, by comparing the similarity of their top-k sets with
the similarity of random sets.

Two random sets of k out of n tokens have an expected Jaccard index near j = (k/n) / (2 - k/n). Heads have to
agree more than random sets do: the threshold is j ** alpha, with alpha at most 1 (0.6 by default). This
module does no I/O. Callers: the selection, and reports on the selection.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations
from statistics import fmean

DEFAULT_ALPHA = 0.6


def jaccard(one: AbstractSet[int], other: AbstractSet[int]) -> float:
    """Return the number of common elements, divided by the number of elements in either set. Return 1 for two
    empty sets.
    """
    either = len(one | other)
    return len(one & other) / either if either else 1.0


def mean_jaccard(sets: Sequence[AbstractSet[int]]) -> float:
    """Return the mean Jaccard index of all pairs of sets. Return 1 if there is only one set, because a single
    head cannot disagree.
    """
    pairs = [jaccard(one, other) for one, other in combinations(sets, 2)]
    return fmean(pairs) if pairs else 1.0


def by_chance(kept: int, total: int) -> float:
    """Return the expected Jaccard index of two random sets of `kept` out of `total` tokens."""
    if not 0 < kept <= total:
        raise ValueError(f"between 1 and all of the {total} tokens can be kept, not {kept}")
    share = kept / total
    return share / (2 - share)


def threshold(kept: int, total: int, *, alpha: float = DEFAULT_ALPHA) -> float:
    """Return the least Jaccard index at which the probed heads stand for all heads. Below this index, all
    tokens are loaded.
    """
    return float(by_chance(kept, total) ** alpha)
