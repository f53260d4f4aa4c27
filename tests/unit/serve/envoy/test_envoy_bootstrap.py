"""The generated bootstrap is complete and valid for the real Envoy."""

import importlib
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from epp.base.errors import ConfigError
from epp.config.sections import Envoy, EnvoyTracing, Listen, Tls
from epp.config.settings import Config
from epp.serve.envoy import files
from epp.serve.envoy.files import bootstrap
from tests.harness.certificate import write_tls

TLS = Tls(cert_file="/tls/cert.pem", key_file="/tls/key.pem", client_ca_file="/tls/ca.pem")


def config_in(directory: Path, *, envoy: Envoy | None = None, listen: Listen | None = None) -> Config:
    eds_file = directory / "eds.json"
    eds_file.write_text('{"version_info": "0", "resources": []}')
    return Config(
        endpoints_file="endpoints.yaml",
        listen=listen or Listen(),
        envoy=msgspec.structs.replace(envoy or Envoy(), eds_file=str(eds_file)),
    )


def validate(text: str, directory: Path) -> None:
    """Let the real Envoy check the file. Its own message is the failure. A deprecated field fails too,
    because Envoy will remove it.
    """
    path = directory / "bootstrap.yaml"
    path.write_text(text)
    envoy = Path(sysconfig.get_path("scripts")) / "envoy"
    done = subprocess.run(
        [envoy, "--mode", "validate", "--config-path", path, "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Deprecated field" not in done.stderr


def parsed(text: str) -> Any:
    """Return the bootstrap as Envoy's own types. A field that these types do not have is an error."""
    types = importlib.import_module("envoy_data_plane.envoy.config.bootstrap.v3")  # seconds to import
    for package in set(re.findall(r"type\.googleapis\.com/([a-z0-9_.]+)\.[A-Z]", text)):
        importlib.import_module(f"envoy_data_plane.{package}")  # `Any` knows only types that were imported
    return types.Bootstrap.from_dict(yaml.safe_load(text))


@pytest.mark.slow
@pytest.mark.parametrize(
    "envoy",
    [
        Envoy(),
        Envoy(status="0.0.0.0:9902", max_heap_bytes=0, fail_open=False),
        Envoy(tls=TLS, tracing=EnvoyTracing(collector="collector:4317")),
    ],
    ids=["defaults", "watched", "tls-traced"],
)
def test_envoy_knows_every_field(envoy: Envoy) -> None:
    config = Config(
        endpoints_file="e.yaml",
        listen=Listen(tls=envoy.tls),
        envoy=msgspec.structs.replace(envoy, eds_file="/run/eds.json"),
    )
    text = bootstrap(config)
    assert parsed(text).static_resources is not None
    assert "&id" not in text, "a dictionary that occurs twice becomes an anchor and an alias in YAML"


@pytest.mark.core
@pytest.mark.envoy
@pytest.mark.parametrize(
    ("envoy", "listen"),
    [
        (Envoy(), Listen()),
        (Envoy(listen="[::]:8080", fail_open=False, access_log=False), Listen()),
        (Envoy(stream_idle_timeout_seconds=0, num_retries=0, max_body_bytes=2**30), Listen()),
        (Envoy(), Listen(address="unix:/run/prefix-gateway/picker.sock")),
        (Envoy(status="0.0.0.0:9902"), Listen()),
    ],
    ids=["defaults", "ipv6-closed", "extremes", "unix", "watched"],
)
def test_real_envoy_accepts_the_bootstrap(tmp_path: Path, envoy: Envoy, listen: Listen) -> None:
    validate(bootstrap(config_in(tmp_path, envoy=envoy, listen=listen)), tmp_path)


@pytest.mark.core
@pytest.mark.envoy
def test_real_envoy_accepts_tls_on_both_sides(tmp_path: Path) -> None:
    tls = write_tls(tmp_path, mutual=True)
    config = config_in(tmp_path, envoy=Envoy(tls=tls), listen=Listen(tls=tls))
    files.write_first(config)
    validate(bootstrap(config), tmp_path)


def test_without_an_endpoints_file_there_is_no_bootstrap() -> None:
    with pytest.raises(ConfigError, match=r"envoy\.edsFile"):
        bootstrap(Config(endpoints_file="endpoints.yaml"))
