"""The `exactMode` section: settings that are refused, and the address of each server's events."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epp.base.errors import ConfigError
from epp.base.types import Address, Endpoint, EndpointName
from epp.config.sections import ExactMode
from epp.config.settings import load_config
from epp.sources.files.endpoints_file import load_endpoints
from epp.sources.kvevents import service


def config_text(tmp_path: Path, exact: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"endpointsFile: endpoints.yaml\nexactMode: {exact}\n")
    return path


@pytest.mark.parametrize(
    ("exact", "match"),
    [
        ("{}", "models"),
        ("{models: []}", "length >= 1"),
        ("{models: [{}]}", r"models\[0\].*tokenizerFolder"),
        ("{models: [{tokenizerFolder: x, hashAlgorithm: sha256}]}", "hashAlgorithm"),
        (
            "{models: [{tokenizerFolder: x}, {tokenizerFolder: y}]}",
            r"models\[1\].model: models\[0\] is for every other",
        ),
        (
            "{models: [{tokenizerFolder: x, model: a}, {tokenizerFolder: y, model: a}]}",
            r"models\[1\].model: models\[0\] is for 'a' too",
        ),
        (
            "{models: [{tokenizerFolder: x}], replayPort: 5557}",
            "replayPort: events and replay need two different ports",
        ),
        ("{models: [{tokenizerFolder: x}], portal: 1}", "portal"),
    ],
)
def test_a_wrong_section_is_refused_with_its_field(tmp_path: Path, exact: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config(config_text(tmp_path, exact))


def test_a_missing_tokenizer_is_refused_at_start(tmp_path: Path) -> None:
    config = load_config(config_text(tmp_path, "{models: [{tokenizerFolder: /nowhere}]}"))
    assert config.exact_mode is not None
    with pytest.raises(ConfigError, match=r"exactMode\.models\[0\]: /nowhere/tokenizer.json: No such file"):
        service.read_models(config.exact_mode)


@pytest.mark.slow
def test_without_the_section_no_module_of_exact_mode_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "endpoints.yaml").write_text("endpoints: [{name: a, address: '10.0.0.1:80'}]")
    path = tmp_path / "config.yaml"
    path.write_text(f"endpointsFile: {tmp_path}/endpoints.yaml\n")
    loaded = (
        "import asyncio, sys; from pathlib import Path; from epp.serve.app import App; from epp.config.settings import load_config\n"
        "async def make(): App(load_config(Path(sys.argv[1])))\n"
        "asyncio.run(make()); print(*[m for m in sys.modules if m.startswith('epp.sources.kvevents') or m in ('zmq', 'tokenizers')])"
    )
    command = [sys.executable, "-c", loaded, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n"


def test_events_are_where_the_endpoint_says_or_at_the_configured_ports() -> None:
    def source(*address: Any, **fields: Any) -> tuple[str, ...]:
        endpoint = Endpoint(EndpointName("a"), Address(*address), **fields)
        found = service.event_source(endpoint, ExactMode(models=()))
        assert found is not None
        return found.model, found.incarnation, found.events, found.replay

    plain = source("10.0.0.1", 8000, model="m", incarnation="7")
    assert plain == ("m", "7", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    assert source("fd00::1", 8000) == ("", "", "tcp://[fd00::1]:5557", "tcp://[fd00::1]:5558")
    assert source("10.0.0.1", 8002, rank=2) == ("", "", "tcp://10.0.0.1:5559", "tcp://10.0.0.1:5560")
    assert source("10.0.0.1", 8000, rank=2, kv_events="ipc:///run/kv") == ("", "", "ipc:///run/kv", "")


def test_an_endpoints_file_may_name_where_events_are() -> None:
    text = "endpoints: [{name: a, address: '10.0.0.1:80', kv_events: 'tcp://10.0.0.1:1', kv_replay: 'tcp://10.0.0.1:2'}]"
    (endpoint,) = load_endpoints(text, source="f").endpoints
    assert (endpoint.kv_events, endpoint.kv_replay) == ("tcp://10.0.0.1:1", "tcp://10.0.0.1:2")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ("kv_replay: 'tcp://10.0.0.1:2'", "kv_replay: needs kv_events"),
        ("kv_events: 'http://10.0.0.1:2'", "kv_events"),
    ],
)
def test_a_wrong_event_address_is_refused(fields: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_endpoints(f"endpoints: [{{name: a, address: '10.0.0.1:80', {fields}}}]", source="f")
