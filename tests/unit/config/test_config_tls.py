"""The certificates of the `listen` and `envoy` sections."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.config.settings import Config, load_config
from epp.config.tls import Tls


def read(folder: Path, text: str) -> Config:
    file = folder / "epp.yaml"
    file.write_text(f"{{endpointsFile: e, {text}}}")
    return load_config(file)


def test_tls_needs_only_a_certificate_and_its_key(tmp_path: Path) -> None:
    config = read(
        tmp_path, "listen: {tls: {certFile: /c, keyFile: /k}}, envoy: {tls: {certFile: /d, keyFile: /l}}"
    )
    assert config.listen.tls == Tls(cert_file="/c", key_file="/k")
    assert config.envoy.tls == Tls(cert_file="/d", key_file="/l")


@pytest.mark.parametrize("section", ["listen", "envoy"])
@pytest.mark.parametrize(
    ("tls", "why"),
    [("{keyFile: k}", "certFile"), ("{certFile: c}", "keyFile"), ("{certFile: c, keyFile: k, ca: x}", "ca")],
)
def test_a_certificate_without_its_key_and_unknown_fields_are_refused(
    tmp_path: Path, section: str, tls: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.tls.*{why}|{why}.*{section}\.tls"):
        read(tmp_path, f"{section}: {{tls: {tls}}}")
