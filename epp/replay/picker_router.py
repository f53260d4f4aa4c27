"""The real picker as the router of the simulated fleet: its own code, with real bytes and the pages that a
scraper would read.

Several replicas get random shares of the requests, and each scrapes for itself. They report their picks to
each other with a delay, or share nothing except the servers. The picker sees what Envoy would show it:
response headers at once (as for a streamed answer, so they say nothing), the end of the stream, and for the
sampled share of requests the usage at the end of the answer. It does not see first tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from epp.config.policy import Policy
from epp.decision import PickRequest
from epp.errors import PickError
from epp.gate import Gate
from epp.picker import Picker
from epp.picker_events import Pick
from epp.replay.shared import Shared
from epp.request.response import ResponseFeedback
from epp.types import Address, ApiKind, Endpoint, EndpointMetrics, EndpointName, InferenceRequest
from model_server.sim.prompts import render
from model_server.sim.request import SimRequest
from model_server.sim.snapshot import Snapshot

BASE_MODEL = "base"
PREFILL_TIMES = ("prefill_sum_s", "prefill_count", "prefill_tokens")
"""The fields from which a server's rate is learned."""


class _Open:
    __slots__ = ("first_token_s", "pick", "picker", "request")

    def __init__(self, picker: Picker, pick: Pick, request: SimRequest) -> None:
        self.picker = picker
        self.pick = pick
        self.request = request
        self.first_token_s: float | None = None


class PickerRouter:
    def __init__(
        self,
        policy: Policy,
        *,
        seed: int,
        replicas: int = 1,
        share_delay_s: float | None = None,
        adapters: frozenset[str] = frozenset(),
        bytes_per_token: float = 4.0,
        absent: Sequence[str] = (),
    ) -> None:
        """absent: fields of `EndpointMetrics` that these servers' pages leave out."""
        self._rng = random.Random(seed)
        self._pickers = [Picker(policy, rng=random.Random(seed * 1000 + n)) for n in range(replicas)]
        self._shared: Shared | None = None
        if share_delay_s is not None:
            self._shared = Shared(self._pickers, delay_s=share_delay_s, gates=self._gates_of_pickers())
        self._adapters = adapters
        self._bytes_per_token = bytes_per_token
        self._absent: dict[str, Any] = dict.fromkeys(absent)
        self._open: dict[int, _Open] = {}
        self._incarnations: dict[str, int] = {}

    @property
    def pickers(self) -> Sequence[Picker]:
        return self._pickers

    @property
    def shared(self) -> Shared | None:
        return self._shared

    def _gates_of_pickers(self) -> Sequence[Gate]:
        """The flow control of each picker. Called once, if the pickers share."""
        return ()

    def _advance(self, now: float) -> None:
        if self._shared is not None:
            self._shared.advance(now)

    def set_servers(self, names: Sequence[str], *, restarted: str, now: float) -> None:
        if restarted:
            self._incarnations[restarted] = self._incarnations.get(restarted, 0) + 1
        endpoints = self._endpoints_of(names)
        for picker in self._pickers:
            picker.set_endpoints(endpoints, now=now)

    def _endpoints_of(self, names: Sequence[str]) -> list[Endpoint]:
        return [
            Endpoint(
                name=EndpointName(name),
                address=Address(f"10.0.{index // 200}.{index % 200 + 1}", 8000),
                model=BASE_MODEL,
                adapters=self._adapters,
                incarnation=str(self._incarnations.get(name, 0)),
            )
            for index, name in enumerate(names)
        ]

    def route(self, request: SimRequest, *, now: float) -> str | None:
        self._advance(now)
        return self._send(request, self._pick_request(request), self._picker_for(request), now=now)

    def _picker_for(self, _request: SimRequest) -> Picker:
        """The picker that gets the request: any."""
        return self._pickers[self._rng.randrange(len(self._pickers))]

    def _pick_request(self, request: SimRequest) -> PickRequest:
        inference = self._inference(request)
        return PickRequest(
            request_id=str(request.request_id),
            inference=inference,
            body_bytes=len(inference.prompt),
            session=request.session,
        )

    def _send(self, request: SimRequest, asked: PickRequest, picker: Picker, *, now: float) -> str | None:
        try:
            pick = picker.pick(asked, now=now)
        except PickError:
            return None
        return self._begun(request, pick, picker, now=now)

    def _begun(self, request: SimRequest, pick: Pick, picker: Picker, *, now: float) -> str:
        picker.housekeep(now=now)
        self._open[request.request_id] = _Open(picker, pick, request)
        if pick.decision.prefill is None:
            self.answered(request.request_id, now=now)
        return pick.decision.chosen

    def answered(self, request_id: int, *, now: float) -> None:
        """The headers of the answer come: at once, unless another server computes the prompt first."""
        opened = self._open[request_id]
        opened.picker.on_response_headers(
            opened.pick, status=200, served=opened.pick.destinations[0], now=now
        )

    def _inference(self, request: SimRequest) -> InferenceRequest:
        return InferenceRequest(
            kind=ApiKind.CHAT,
            model=request.adapter or BASE_MODEL,
            prompt=render(request.segments, bytes_per_token=self._bytes_per_token),
            stream=True,
            max_tokens=request.answer.num_tokens,
        )

    def first_token(self, request_id: int, *, now: float) -> None:
        self._open[request_id].first_token_s = now

    def ended(self, request_id: int, *, failed: bool, cached_tokens: int, now: float) -> None:
        self._advance(now)
        done = self._open.pop(request_id)
        if done.pick.sampled and not failed:
            feedback = ResponseFeedback(
                first_token_at=done.first_token_s,
                prompt_tokens=done.request.num_prompt_tokens,
                cached_tokens=cached_tokens,
                completion_tokens=done.request.answer.num_tokens,
                complete=True,
            )
            done.picker.on_feedback(done.pick, feedback, now=now)
        done.picker.end(done.pick, outcome="failed" if failed else "ended", now=now)

    def scraped(self, scraper: int, server: str, page: Snapshot, *, now: float) -> None:
        self._advance(now)
        metrics = metrics_of(page, read_at_s=now)
        if self._absent:
            metrics = replace(metrics, **self._absent)
        self._pickers[scraper].observe(EndpointName(server), metrics, now=now)


def metrics_of(page: Snapshot, *, read_at_s: float) -> EndpointMetrics:
    """The page as the scraper would pass it on. It knows when a page came, not how old it is."""
    return EndpointMetrics(
        scraped_at=read_at_s,
        running=page.running,
        waiting=page.waiting,
        kv_usage=page.kv_usage,
        capacity_tokens=page.capacity_tokens,
        block_size=page.block_tokens,
        prompt_tokens=page.prompt_tokens,
        cached_prompt_tokens=page.cached_prompt_tokens,
        generated_tokens=page.generated_tokens,
        prefix_queries=page.query_tokens,
        prefix_hits=page.hit_tokens,
        finished=page.finished,
        ttft_sum_s=page.ttft_sum_s,
        ttft_count=page.ttft_count,
        prefill_sum_s=page.prefill_sum_s,
        prefill_count=page.finished,
        prefill_tokens=page.prefill_tokens,
        max_lora=page.max_loras,
        active_adapters=page.active_adapters,
    )
