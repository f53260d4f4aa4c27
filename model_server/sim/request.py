"""One simulated request, and its results."""

from dataclasses import dataclass

from model_server.sim.prompts import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    request_id: int
    segments: tuple[Segment, ...]
    answer: Segment
    """The answer is a segment of this many tokens. A later prompt that continues the conversation contains
    this segment.
    """
    adapter: str = ""
    session: str = ""
    tenant: str = ""
    priority: int = 0
    """The priority. A request with a larger number goes first, if the router knows priorities."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.segments)


@dataclass(slots=True, kw_only=True)
class Record:
    """The results of a request. Times are seconds of the virtual clock. None means that the request did not
    reach this point.
    """

    request: SimRequest
    arrived_s: float
    server: str = ""
    """The name of the server. Empty means that the router refused the request."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    failed: bool = False
    num_preemptions: int = 0

    @property
    def completed(self) -> bool:
        return self.ended_s is not None and not self.failed
