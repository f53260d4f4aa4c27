"""InferenceModelRewrites of one API group: other names for models. Fed by a reflector; read by `cluster`.

The oldest object goes first, by name where two are of one second, so that all replicas agree; of two rules for one name the first counts.
Weights are meant to be set for all targets of a rule or for none; one that is missing counts as 1. A target without a name is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from epp.kube.objects import ModelRewrite
from epp.request.names import MAX_NAME_CHARS
from epp.request.rewriting import Rewrites, Rule, Target

PATHS: Final[Mapping[str, str]] = {
    "llm-d.ai": "/apis/llm-d.ai/v1alpha2/namespaces/{namespace}/inferencemodelrewrites",
    "inference.networking.x-k8s.io": "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{namespace}/inferencemodelrewrites",
}
"""Where each group has them; the newer first."""
_MOST_OBJECTS: Final = 1024
"""Of one group; more are left out."""
_MOST_RULES: Final = 1024
"""Of one object."""
_MOST_NAMES: Final = 1024
"""Of one rule: models that it matches, and targets."""
_MOST_WEIGHT: Final = 1_000_000


class ModelRewrites:
    """Those of one pool, by name."""

    def __init__(self, *, pool: str) -> None:
        self._pool = pool
        self._objects: dict[str, tuple[str, Sequence[Rule]]] = {}

    def replace(self, objects: Iterable[ModelRewrite]) -> None:
        """All that there are."""
        self._objects.clear()
        for found in objects:
            self.put(found)

    def put(self, found: ModelRewrite) -> None:
        self.remove(found)
        if found.spec.pool_ref.name == self._pool and len(self._objects) < _MOST_OBJECTS:
            self._objects[found.metadata.name] = (found.metadata.creation_timestamp, _rules(found))

    def remove(self, found: ModelRewrite) -> None:
        self._objects.pop(found.metadata.name, None)

    def rules(self) -> list[Rule]:
        """In the order in which they count."""
        oldest_first = sorted((created, name) for name, (created, _) in self._objects.items())
        return [rule for _, name in oldest_first for rule in self._objects[name][1]]


def all_rewrites(newer_first: Sequence[ModelRewrites]) -> Rewrites:
    """Of several groups."""
    return Rewrites(rule for rewrites in newer_first for rule in rewrites.rules())


def _rules(found: ModelRewrite) -> Sequence[Rule]:
    rules = []
    for rule in found.spec.rules[:_MOST_RULES]:
        models = tuple(match.model.value for match in rule.matches[:_MOST_NAMES] if match.model.value)
        targets = tuple(
            Target(target.model_rewrite, max(1, min(_MOST_WEIGHT, target.weight or 1)))
            for target in rule.targets[:_MOST_NAMES]
            if 0 < len(target.model_rewrite) <= MAX_NAME_CHARS
        )
        if targets and (models or not rule.matches):
            rules.append(Rule(models, targets))
    return rules
