"""What `epp check` reports: certificates that do not fit, folders that cannot be written, too short waits."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from epp.config.dialects import WAIT_SHARE
from epp.config.flow import Flow
from epp.config.policy import DEFAULT_POLICY, Cost, FailureSettings, PolicySpec, PrefixHashSettings
from epp.config.sections import Envoy
from epp.config.settings import Config
from epp.serve.cli import main
from epp.serve.preflight import contradictions
from tests.harness.certificate import CERTIFICATE, PRIVATE_KEY

OTHER_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQghFHWfkbf6aV0fTNd
iDdR+tNgBmCGWKxKGwxJLdUaP2OhRANCAARQHmfxGe6m3lT6EkRGWU2l7t8faTTj
4P7Nayfi8UZ0LFRpz+w39fvtSzhgu6LFVKB1soaMt3+IlzmO3sg/ekPK
-----END PRIVATE KEY-----
"""
PROTECTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAjcPIguaV8H9gICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEECZxDosn4HCfK7hScsY4omcEgZBa
YqwUGW2ZN6OpmhC1Vgl7nsxe9fQ3nThGZjGCL2HDxYopaSSis0GyAOoq+efaQijk
ruDkCJ4w0QGaF9rk6LUvdRhBKj3O4lVlMdqRVT+pxAEzcVZGAIlceMXK0LasvGaQ
iTpDyVF3n5b7hIoaV9CM2D9hryzVqbW36vDCTA/dVN5m8KhnVoq2y6Itf8gC00U=
-----END ENCRYPTED PRIVATE KEY-----
"""


def preflight(folder: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit status and the text on stderr."""
    (folder / "endpoints.yaml").write_text('endpoints: [{name: a, address: "10.0.0.1:8000"}]')
    path = folder / "config.yaml"
    path.write_bytes(msgspec.yaml.encode({"endpointsFile": str(folder / "endpoints.yaml"), **config}))
    before = sorted(folder.rglob("*"))
    status = main(["check", "--config", str(path)])
    assert sorted(folder.rglob("*")) == before, "a check leaves nothing behind"
    return status, capsys.readouterr().err


def tls(folder: Path, *, cert: str = CERTIFICATE, key: str = PRIVATE_KEY, **fields: str) -> dict[str, str]:
    (folder / "tls.crt").write_text(cert)
    (folder / "tls.key").write_text(key)
    return {"certFile": str(folder / "tls.crt"), "keyFile": str(folder / "tls.key"), **fields}


def test_a_valid_configuration_passes_without_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tls(tmp_path, clientCaFile=str(tmp_path / "tls.crt"), caFile=str(tmp_path / "tls.crt"))
    envoy = {"edsFile": str(tmp_path / "made later" / "eds.json"), "tls": files}
    assert preflight(tmp_path, {"listen": {"tls": files}, "envoy": envoy}, capsys) == (0, "")
    picker = {"address": f"unix:{tmp_path}/picker.sock"}
    assert preflight(tmp_path, {"listen": picker, "workers": 2}, capsys) == (0, "")


@pytest.mark.parametrize("section", ["listen", "envoy"])
@pytest.mark.parametrize("key", [OTHER_KEY, PROTECTED_KEY, "no key"], ids=["other", "passphrase", "no key"])
def test_a_key_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, key: str
) -> None:
    status, lines = preflight(tmp_path, {section: {"tls": tls(tmp_path, key=key)}}, capsys)
    assert status == 2
    assert f"{section}.tls.keyFile: {tmp_path}/tls.key: this key does not belong to certFile" in lines
    assert "name the matching key, in PEM and without a passphrase" in lines


@pytest.mark.parametrize("field", ["certFile", "clientCaFile", "caFile"])
@pytest.mark.parametrize("text", ["", "\u00fc", CERTIFICATE[:200]], ids=["empty", "no PEM", "cut off"])
def test_a_file_that_is_not_a_certificate_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, text: str
) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text(text)
    status, lines = preflight(tmp_path, {"listen": {"tls": tls(tmp_path) | {field: str(bad)}}}, capsys)
    assert status == 2
    assert (
        f"listen.tls.{field}: {bad}: this file holds no certificate that can be read; it must be PEM" in lines
    )


def test_a_missing_file_of_envoy_is_a_remark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tls(tmp_path) | {"keyFile": "/nowhere/tls.key"}
    status, lines = preflight(tmp_path, {"envoy": {"tls": missing}}, capsys)
    assert status == 0
    assert lines == (
        "epp: envoy.tls.keyFile: /nowhere/tls.key: this user finds no such file here; Envoy needs the file on the machine where Envoy runs\n"
    )


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = preflight(tmp_path, {"envoy": {"edsFile": "/proc/eds.json"}}, capsys)
    assert status == 2
    assert "envoy.edsFile: cannot write in /proc: " in lines
    (tmp_path / "file").touch()
    for path in (f"{tmp_path}/file/eds.json", f"{tmp_path}/file/below/eds.json"):
        status, lines = preflight(tmp_path, {"envoy": {"edsFile": path}}, capsys)
        assert status == 2
        assert "Not a directory; one part of this path is a file and not a folder: correct the path" in lines


def test_a_socket_needs_an_existing_folder_a_short_path_and_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = preflight(tmp_path, {"listen": {"address": f"unix:{tmp_path}/none/p.sock"}}, capsys)
    assert status == 2
    assert f"listen.address: cannot write in {tmp_path}/none: No such file" in lines
    status, lines = preflight(tmp_path, {"listen": {"address": f"unix:{tmp_path}/{'p' * 100}"}}, capsys)
    assert status == 2
    assert "the path of a unix socket has at most 107 bytes; choose a shorter path" in lines
    (tmp_path / "p.sock").touch()
    status, lines = preflight(tmp_path, {"listen": {"address": f"unix:{tmp_path}/p.sock"}}, capsys)
    assert status == 2
    assert "this file exists and is not a socket; remove it, or choose another path" in lines


def test_the_socket_of_a_running_picker_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as running:
        running.bind("p.sock")
        assert preflight(tmp_path, {"listen": {"address": f"unix:{tmp_path}/p.sock"}}, capsys) == (0, "")


# -- a gateway that does not wait as long as the policy lets requests wait -----------------------------------

OWN = {"eds_file": "/run/eds.json"}


@pytest.mark.parametrize(
    ("dialect", "envoy", "flow", "remark"),
    [
        ("auto", OWN, {"mode": "Hold"}, ""),
        (
            "envoy",
            OWN,
            {"mode": "Hold", "ttl_by_priority": {"-10": 600}},
            f"refused after {60 * WAIT_SHARE:g} s, nine tenths of envoy.maxMessageTimeoutSeconds",
        ),
        (
            "auto",
            {**OWN, "max_message_timeout_seconds": 5.0},
            {"mode": "Hold"},
            "but with envoy a request with a buffered body is refused after 4.5 s",
        ),
        (
            "envoy-gateway",
            {},
            {"mode": "Hold"},
            "refused after 0.9 s, nine tenths of envoy.messageTimeoutSeconds",
        ),
        ("envoy-gateway", {"message_timeout_seconds": 40.0}, {"mode": "Hold"}, ""),
        ("auto", {}, {"mode": "Hold"}, "no request with a buffered body waits"),
        ("auto", {"max_message_timeout_seconds": 60.0}, {"mode": "Hold"}, ""),
        ("nginx", {}, {"mode": "Hold"}, "no request waits"),
        ("nginx", {}, {"ttl_seconds": 3600.0}, ""),
        (
            "envoy",
            OWN,
            {"wait_for_server_seconds": 600.0},
            "waitForServerSeconds: requests may wait for 600 s",
        ),
        *((full_duplex, {}, {"mode": "Hold", "ttl_seconds": 3600.0}, "") for full_duplex in ("istio", "gke")),
    ],
)
def test_a_gateway_that_waits_for_too_short_a_time_gets_a_remark(
    dialect: Any, envoy: dict[str, Any], flow: dict[str, Any], remark: str
) -> None:
    config = Config(endpoints_file="endpoints.yaml", dialect=dialect, envoy=Envoy(**envoy))
    policy = replace(DEFAULT_POLICY, spec=PolicySpec(flow=Flow(**flow)))
    faults = list(contradictions(config, policy))
    assert len(faults) == bool(remark)
    assert remark in "".join(faults)


def test_former_names_and_numbers_that_make_a_hot_spot_get_a_remark() -> None:
    hashed = PrefixHashSettings(max_load_ratio=4.5, min_in_flight=65)
    fields: dict[str, list[str]] = {"prefix-hash": [], "least-cost": [], "affinity": []}
    for rule, found in fields.items():
        spec = PolicySpec(rule=rule, prefix_hash=hashed, cost=Cost(uncached_token_weight=50))  # type: ignore[arg-type]
        spec = replace(spec, failures=FailureSettings(max_left_out_share=0.2))
        faults = contradictions(Config(endpoints_file="e.yaml"), replace(DEFAULT_POLICY, spec=spec))
        former, *found[:] = [remark.split(":")[0] for remark in faults]
        assert former == "failures.maxLeftOutShare"
    assert fields["prefix-hash"] == ["prefixHash.maxLoadRatio", "prefixHash.minInFlight"]
    assert (fields["least-cost"], fields["affinity"]) == (["cost.uncachedTokenWeight"], [])
