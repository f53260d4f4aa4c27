"""Turns answers into rows of locust's statistics and into figures. Each process of the generator has one
recorder.

Requests are events of locust's own (`ANSWER` rows), so its totals count answers. The other measures are rows
beside them and stay out of the totals, because a sum of times to first token and of tokens a second has no
meaning.
"""

import logging
import time
from typing import Final

from locust.env import Environment

from bench.load.figures import Figures
from bench.load.sse import Answer, AnswerError

_LOG = logging.getLogger(__name__)
ROWS: Final = {
    "ttft_s": ("TTFT", 1000.0),
    "inter_token_s": ("INTER-TOKEN", 1000.0),
    "longest_gap_s": ("LONGEST-GAP", 1000.0),
    "tokens_per_s": ("TOKENS/S", 1.0),
}
"""The row of each measure, and the number that locust shows as milliseconds. Times are shown as milliseconds,
and tokens a second unchanged.
"""


class Recorder:
    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.figures = Figures()

    def ask(self) -> None:
        self.figures.asked += 1
        self.figures.first_at = min(self.figures.first_at, time.monotonic())

    def answer(self, name: str, answer: Answer, *, began_at: float, ended_at: float, size_bytes: int) -> None:
        """Record a whole answer. `began_at` is the time when the request was sent."""
        figures = self.figures
        figures.answered += 1
        figures.last_at = max(figures.last_at, time.monotonic())
        figures.prompt_tokens += answer.prompt_tokens
        figures.cached_tokens += answer.cached_tokens
        figures.output_tokens += answer.output_tokens
        figures.uncounted += not answer.tokens_counted
        answer_s = ended_at - began_at
        figures.measures["answer_s"].add(answer_s)
        self._environment.events.request.fire(
            request_type="ANSWER",
            name=name,
            response_time=answer_s * 1000,
            response_length=size_bytes,
            exception=None,
            context={},
        )
        values = {
            "ttft_s": answer.first_token_at - began_at,
            "inter_token_s": answer.inter_token_s,
            "longest_gap_s": answer.longest_gap_s,
            "tokens_per_s": answer.output_tokens / answer_s if answer_s > 0 else None,
        }
        for measure, value in values.items():
            if value is not None:
                figures.measures[measure].add(value)
                row, unit = ROWS[measure]
                self._row(row, name, value * unit, tokens=answer.output_tokens)

    def failure(self, name: str, error: AnswerError, *, began_at: float, ended_at: float) -> None:
        if error.kind not in self.figures.failures:
            _LOG.warning("the first failure of its kind: %s", error)
        self.figures.fail(error.kind, str(error))
        self.figures.last_at = max(self.figures.last_at, time.monotonic())
        self._environment.events.request.fire(
            request_type="ANSWER",
            name=name,
            response_time=(ended_at - began_at) * 1000,
            response_length=0,
            exception=AnswerError(error.kind),
            context={},
        )

    def _row(self, row: str, name: str, value: float, *, tokens: int) -> None:
        # locust's annotation says int, but locust keeps fractions and rounds them itself.
        self._environment.stats.entries[(name, row)].log(value, tokens)  # type: ignore[arg-type]
