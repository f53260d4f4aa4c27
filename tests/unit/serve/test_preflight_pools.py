"""`epp check` names the settings that keep the model from choosing among several InferencePools, and the
transport on which the picker does not learn that it is overloaded.
"""

from __future__ import annotations

from typing import Any

import pytest

from epp.config.kubernetes import Kubernetes
from epp.config.listening import Listen
from epp.config.settings import Config, Models
from epp.serve.preflight import inspect

SEVERAL = Kubernetes(pools=("a", "b"))


def remarks(**fields: Any) -> str:
    config = Config(**{"kubernetes": SEVERAL} | fields)
    return "\n".join(each for each in inspect(config) if "pools" in each)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"models": Models(ask=False)}, "so the picker knows the model only of pods with the annotation"),
        (
            {"models": Models(unknown="Route")},
            "models.unknown: with Route a request for an unknown model may go to any",
        ),
        ({"dialect": "gke"}, "kubernetes.pools: gke chooses the InferencePool by its route"),
    ],
)
def test_settings_that_contradict_several_pools_get_a_remark(fields: dict[str, Any], why: str) -> None:
    assert why in remarks(**fields)
    assert not remarks(**fields, kubernetes=Kubernetes(pool="a"))


def test_several_pools_with_models_that_are_asked_for_get_no_remark() -> None:
    assert not remarks()
    assert not remarks(dialect="envoy")


@pytest.mark.parametrize(("transport", "told"), [("http2", False), ("grpcio", True)])
def test_only_grpcio_gets_the_remark_about_overload(transport: str, *, told: bool) -> None:
    listen = Listen(address="127.0.0.1:9002", transport="grpcio" if transport == "grpcio" else "http2")
    remarks = inspect(Config(endpoints_file="endpoints.yaml", listen=listen))
    assert any("does not see that it is overloaded" in remark for remark in remarks) is told
