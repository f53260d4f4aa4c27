"""The addresses of the workers, for Envoy and for people, and the certificates of both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.config.listening import Admin, Listen
from epp.config.settings import Config, load_config
from epp.config.tls import Tls


@pytest.mark.parametrize(
    ("address", "workers", "expected"),
    [
        ("unix:/run/p.sock", 1, ("unix:/run/p.sock",)),
        ("unix:/run/p.sock", 2, ("unix:/run/p.sock.0", "unix:/run/p.sock.1")),
        ("10.0.0.1:9002", 1, ("10.0.0.1:9002",)),
        ("[fd00::1]:9002", 3, ("[fd00::1]:9002", "[fd00::1]:9003", "[fd00::1]:9004")),
    ],
)
def test_each_worker_has_its_own_address(address: str, workers: int, expected: tuple[str, ...]) -> None:
    assert Listen(address=address).addresses(workers=workers) == expected


def test_each_worker_has_its_own_admin_address() -> None:
    assert [str(a) for a in Admin(address="[::1]:9090").addresses(workers=2)] == ["[::1]:9090", "[::1]:9091"]


@pytest.mark.parametrize("section", [Listen(address="127.0.0.1:65535"), Admin(address="127.0.0.1:65535")])
def test_ports_that_do_not_exist_are_refused(section: Listen | Admin) -> None:
    assert len(section.addresses(workers=1)) == 1
    with pytest.raises(ValueError, match="2 workers need 2 consecutive ports"):
        section.addresses(workers=2)


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
