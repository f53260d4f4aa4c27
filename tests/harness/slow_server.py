"""A picker in this process whose one server is busy for a minute with each prompt, so that flow control holds
requests.
"""

from __future__ import annotations

import random
import time

from epp.base.types import Address, Endpoint, EndpointMetrics, EndpointName
from epp.config.flow import Flow
from epp.config.observing import Sampling
from epp.config.policy import API_VERSION, KIND, Metadata, Policy, PolicySpec
from epp.config.routing import Cost
from epp.picker.picker import Picker

_SERVER = EndpointName("m0")


def picker_of_slow_server(address: Address) -> Picker:
    """Return a picker whose policy says that its one server computes one token a second."""
    spec = PolicySpec(
        flow=Flow(mode="Hold"),
        cost=Cost(prefill_tokens_per_second=1.0),
        sampling=Sampling(share=0),
    )
    policy = Policy(api_version=API_VERSION, kind=KIND, metadata=Metadata(name="test"), spec=spec)
    picker = Picker(policy, rng=random.Random(1))
    picker.set_endpoints([Endpoint(_SERVER, address)], now=time.monotonic())
    return picker


def say_running(picker: Picker, running: int) -> None:
    """Let the server's metrics page say that so many requests run, and that none waits."""
    now = time.monotonic()
    picker.observe(_SERVER, EndpointMetrics(scraped_at=now, running=running, waiting=0), now=now)
