"""Makes the real picker the router of the simulated fleet: the picker gets real bytes, and the pages that a
scraper would read.

The picker sees what Envoy would show it: response headers at once (as for a streamed answer, so they say
nothing), the end of the stream, and for the sampled share of requests the usage at the end of the answer. It
does not see first tokens. The benches of routing derive their routers from this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from epp.base.errors import PickError
from epp.base.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from epp.picker.decision import Question
from epp.picker.events import Pick
from epp.picker.picker import Picker
from epp.request.response import ResponseFeedback
from model_server.sim.engine import Snapshot
from model_server.sim.prompts import render
from model_server.sim.request import SimRequest

BASE_MODEL = "base"


@dataclass(slots=True)
class _OpenCall:
    picker: Picker
    pick: Pick
    request: SimRequest
    first_token_s: float | None = None


class PickerRouter:
    """All requests go to the first picker, unless a derived class says otherwise (`route`)."""

    def __init__(
        self, pickers: list[Picker], *, adapters: frozenset[str], bytes_per_token: float = 4.0
    ) -> None:
        self.pickers = pickers
        self._adapters = adapters
        self._bytes_per_token = bytes_per_token
        self._open: dict[int, _OpenCall] = {}
        self._incarnations: dict[str, int] = {}
        self._places: dict[str, int] = {}
        """The place of each server's address. A server keeps its address when others come or go."""

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        if restarted:
            self._incarnations[restarted] = self._incarnations.get(restarted, 0) + 1
        endpoints = [
            Endpoint(
                name=EndpointName(name),
                address=self._address(name),
                model=BASE_MODEL,
                adapters=self._adapters,
                incarnation=str(self._incarnations.get(name, 0)),
            )
            for name in names
        ]
        for picker in self.pickers:
            picker.news.set_endpoints(endpoints, now=now)

    def _address(self, name: str) -> Address:
        place = self._places.setdefault(name, len(self._places))
        return Address(f"10.{place // 40_000}.{place // 200 % 200}.{place % 200 + 1}", 8000)

    def route(self, request: SimRequest, *, now: float) -> str | None:
        return self._send(request, self._pick_request(request), self.pickers[0], now=now)

    def _pick_request(self, request: SimRequest) -> Question:
        inference = InferenceRequest(
            kind=ApiKind.CHAT,
            model=request.adapter or BASE_MODEL,
            prompt=render(request.segments, bytes_per_token=self._bytes_per_token),
            stream=True,
            max_tokens=request.answer.num_tokens,
        )
        return Question(
            request_id=str(request.request_id),
            inference=inference,
            body_bytes=len(inference.prompt),
            session=request.session,
        )

    def _send(self, request: SimRequest, asked: Question, picker: Picker, *, now: float) -> str | None:
        try:
            pick = picker.pick(asked, now=now)
        except PickError:
            return None
        return self._begun(request, pick, picker, now=now)

    def _begun(self, request: SimRequest, pick: Pick, picker: Picker, *, now: float) -> str:
        picker.housekeep(now=now)
        self._open[request.request_id] = _OpenCall(picker, pick, request)
        picker.on_response_headers(pick, status=200, served=pick.destinations[0], now=now)
        return pick.decision.chosen

    def first_token(self, request_id: int, *, now: float) -> None:
        self._open[request_id].first_token_s = now

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        done = self._open.pop(request_id)
        if done.pick.sampled and not failed:
            feedback = ResponseFeedback(
                first_token_at=done.first_token_s,
                prompt_tokens=done.request.num_prompt_tokens,
                cached_tokens=cached_tokens,
                completion_tokens=done.request.answer.num_tokens,
            )
            done.picker.on_feedback(done.pick, feedback, now=now)
        done.picker.end(done.pick, outcome="failed" if failed else "ended", now=now)

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None:
        self.pickers[scraper].news.observe(EndpointName(server), metrics_of(page, read_at_s=now), now=now)


def metrics_of(page: Snapshot, *, read_at_s: float) -> EndpointMetrics:
    """Return the page as the scraper would pass it on. The scraper knows when a page came, not how old the
    page is.
    """
    counters = page.counters
    return EndpointMetrics(
        scraped_at=read_at_s,
        running=page.running,
        waiting=page.waiting,
        kv_usage=page.kv_usage,
        capacity_tokens=page.shape.capacity_tokens,
        block_size=page.shape.block_tokens,
        prompt_tokens=counters.prompt_tokens,
        cached_prompt_tokens=counters.cached_prompt_tokens,
        generated_tokens=counters.generated_tokens,
        prefix_queries=counters.query_tokens,
        prefix_hits=counters.hit_tokens,
        finished=counters.finished,
        ttft_sum_s=counters.ttft_sum_s,
        ttft_count=counters.ttft_count,
        max_lora=page.shape.limits.max_loras,
        active_adapters=page.active_adapters,
    )
