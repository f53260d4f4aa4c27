"""`epp check` warns of a gateway that does not wait as long as the policy lets requests wait."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from epp.config.dialects import WAIT_SHARE
from epp.config.envoy import Envoy
from epp.config.flow import Flow
from epp.config.policy import DEFAULT_POLICY, PolicySpec
from epp.config.settings import Config
from epp.serve.preflight import contradictions

OWN = {"eds_file": "/run/eds.json"}


def remarks(dialect: Any, *, envoy: dict[str, Any] | None = None, **flow: Any) -> list[str]:
    config = Config(endpoints_file="endpoints.yaml", dialect=dialect, envoy=Envoy(**(envoy or {})))
    policy = replace(DEFAULT_POLICY, spec=PolicySpec(flow=Flow(**flow)))
    return list(contradictions(config, policy))


def test_our_own_envoy_waits_long_enough_for_the_default_policy() -> None:
    assert remarks("auto", envoy=OWN, mode="Hold") == []


def test_wait_beyond_the_bound_of_our_own_envoy_gets_a_remark_with_bound() -> None:
    (said,) = remarks("envoy", envoy=OWN, mode="Hold", ttl_by_priority={"-10": 600})
    assert (
        f"wait for 600 s, but with envoy a request with a buffered body is refused after {60 * WAIT_SHARE:g} s"
        in said
    )
    assert "envoy.maxMessageTimeoutSeconds" in said


def test_our_own_envoy_is_not_called_unknown_if_no_dialect_is_set() -> None:
    (said,) = remarks("auto", envoy={**OWN, "max_message_timeout_seconds": 5.0}, mode="Hold")
    assert "but with envoy a request with a buffered body is refused after 4.5 s" in said


def test_envoy_gateway_is_not_asked_for_time_and_its_timeout_is_the_bound() -> None:
    (said,) = remarks("envoy-gateway", mode="Hold")
    assert "refused after 0.9 s, nine tenths of envoy.messageTimeoutSeconds" in said
    assert remarks("envoy-gateway", envoy={"message_timeout_seconds": 40.0}, mode="Hold") == []
    config = Config(endpoints_file="endpoints.yaml", dialect="envoy-gateway")
    assert (config.asks_for_s, config.gives_s) == (0.0, 1.0)


def test_an_unknown_gateway_gets_a_remark_until_its_timeout_is_set() -> None:
    (said,) = remarks("auto", mode="Hold")
    assert "no request with a buffered body waits" in said
    assert remarks("auto", envoy={"max_message_timeout_seconds": 60.0}, mode="Hold") == []


def test_a_gateway_that_does_not_wait_for_bodies_holds_nothing() -> None:
    (said,) = remarks("nginx", mode="Hold")
    assert "no request waits" in said


@pytest.mark.parametrize("dialect", ["istio", "ai-gateway", "agentgateway", "gke"])
def test_there_is_no_remark_in_full_duplex(dialect: str) -> None:
    assert remarks(dialect, mode="Hold", ttl_seconds=3600.0) == []


def test_a_policy_that_holds_nothing_needs_no_time() -> None:
    assert remarks("nginx", ttl_seconds=3600.0) == []
