"""`epp check` names the settings that keep the model from choosing among several InferencePools."""

from __future__ import annotations

from typing import Any

import pytest

from epp.config.kubernetes import Kubernetes
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
