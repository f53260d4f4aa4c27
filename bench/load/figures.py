"""Holds the figures of one run: counts, failures by class, and a histogram of each measure. The figures are
plain data that can be added up over processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.load.health import Health
from bench.load.samples import Samples

MEASURES: Final = ("ttft_s", "inter_token_s", "longest_gap_s", "answer_s", "tokens_per_s")
_EXAMPLES: Final = 3


@dataclass(slots=True)
class Figures:
    """The figures of one scenario in one run."""

    asked: int = 0
    answered: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    uncounted: int = 0
    """Answers without usage. Their events count as tokens."""
    first_at: float = math.inf
    last_at: float = -math.inf
    """The time when the last answer ended. `first_at` is the time when the first request was sent. Both are
    times of the machine's monotonic clock, which its processes share.
    """
    measures: dict[str, Samples] = field(default_factory=lambda: {name: Samples() for name in MEASURES})
    health: Health = field(default_factory=Health)

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def unfinished(self) -> int:
        """Return the number of requests that were sent and not answered when the run ended."""
        return self.asked - self.answered - self.failed

    @property
    def duration_s(self) -> float:
        return max(0.0, self.last_at - self.first_at) if self.asked else 0.0

    @property
    def verdict(self) -> list[str]:
        """Return the reasons why the generator was the bottleneck. The list is empty if the generator was
        fast enough.
        """
        return self.health.verdict(median_ttft_s=self.measures["ttft_s"].quantile(0.5))

    def fail(self, kind: str, detail: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < _EXAMPLES and detail not in examples:
            examples.append(detail)

    def merge(self, other: Figures) -> None:
        for name in ("asked", "answered", "prompt_tokens", "cached_tokens", "output_tokens", "uncounted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, count in other.failures.items():
            self.failures[kind] = self.failures.get(kind, 0) + count
            known = self.examples.setdefault(kind, [])
            known += [text for text in other.examples.get(kind, []) if text not in known][
                : _EXAMPLES - len(known)
            ]
        self.first_at = min(self.first_at, other.first_at)
        self.last_at = max(self.last_at, other.last_at)
        for name, samples in other.measures.items():
            self.measures[name].merge(samples)
        self.health.merge(other.health)

    def document(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "answered": self.answered,
            "failures": self.failures,
            "examples": self.examples,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "uncounted": self.uncounted,
            "first_at": self.first_at if self.asked else None,
            "last_at": self.last_at if math.isfinite(self.last_at) else None,
            "measures": {name: samples.document() for name, samples in self.measures.items()},
            "health": self.health.document(),
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Figures:
        plain = {
            name: document[name]
            for name in ("asked", "answered", "prompt_tokens", "cached_tokens", "output_tokens", "uncounted")
        }
        return cls(
            **plain,
            failures=dict(document["failures"]),
            examples={kind: list(texts) for kind, texts in document["examples"].items()},
            first_at=math.inf if document["first_at"] is None else document["first_at"],
            last_at=-math.inf if document["last_at"] is None else document["last_at"],
            measures={name: Samples.of(samples) for name, samples in document["measures"].items()},
            health=Health.of(document["health"]),
        )

    def check_integrity(self) -> None:
        assert self.unfinished >= 0
        assert self.measures["ttft_s"].count == self.answered
        self.health.check_integrity()
        for samples in self.measures.values():
            samples.check_integrity()


def together(parts: Iterable[Figures]) -> Figures:
    """Return the sum over several processes or several scenarios."""
    whole = Figures()
    for part in parts:
        whole.merge(part)
    return whole


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run: its options, and the figures of each scenario. The report is made from this."""

    label: str
    settings: Mapping[str, Any]
    figures: Figures

    def write(self, file: Path) -> None:
        document = {"label": self.label, "settings": self.settings, "figures": self.figures.document()}
        file.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> RunRecord:
        document = json.loads(file.read_text())
        return cls(document["label"], document["settings"], Figures.of(document["figures"]))
