"""Computes the growth of counters between two scrapes. They only grow, unless another process serves now."""

from __future__ import annotations

from epp.base.types import EndpointMetrics


def growth(before: float | None, after: float | None) -> float:
    """Return how much a counter grew. 0: one of the values is unknown, or the counter has started again."""
    return max(0.0, after - before) if before is not None and after is not None else 0.0


def computed_growth(before: EndpointMetrics, after: EndpointMetrics) -> float:
    """Return prompt tokens computed between two scrapes, without those that came from the cache."""
    prompt = growth(before.prompt_tokens, after.prompt_tokens)
    return max(0.0, prompt - growth(before.cached_prompt_tokens, after.cached_prompt_tokens))


def restarted(before: EndpointMetrics, after: EndpointMetrics) -> bool:
    """Return whether a counter went down. Then another process with a cold cache answers now."""
    pairs = ((before.prompt_tokens, after.prompt_tokens), (before.prefix_queries, after.prefix_queries))
    return any(b is not None and a is not None and a < b for b, a in pairs)
