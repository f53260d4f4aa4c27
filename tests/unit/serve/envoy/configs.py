"""Configurations for the tests of the bootstrap's parts."""

from typing import Any

import msgspec

from epp.config.sections import Envoy, Listen
from epp.config.settings import Config


def a_config(*, listen: Listen | None = None, workers: int = 1, **envoy: Any) -> Config:
    """Return a configuration with these fields of its `envoy` section."""
    return Config(
        endpoints_file="e.yaml",
        workers=workers,
        listen=listen or Listen(),
        envoy=msgspec.structs.replace(Envoy(eds_file="/run/eds.json"), **envoy),
    )
