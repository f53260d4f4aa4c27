"""The options of a conformance run, the picker under test, and the table of rows at the end of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from tests.conformance.picker import OwnPicker, PickerUnderTest, own_picker
from tests.conformance.rows import ROWS, row_of
from tests.harness.transport import transport
from tests.harness.transport_fixtures import both_transports  # noqa: F401 - a fixture

_OPTIONS = {
    "--picker": "ip:port or unix:/path of a picker that is running; without it ours is started",
    "--picker-endpoints": "comma list of all ip:port that it may choose from, at least two, none of them under load",
    "--picker-has": "comma list of what it was started with: conformance-headers, scores",
    "--picker-ca": "PEM file: the picker speaks TLS, with a certificate of this authority",
    "--picker-cert": "PEM file: the certificate of the tests, for a picker that asks for one",
    "--picker-key": "PEM file: the key of --picker-cert",
    "--picker-server-name": "the name in the picker's certificate, where it is not its address",
}
_CONTROL = "needs to start, stop or steer the picker, which one given by address does not allow"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "endpoint picker conformance")
    for name, text in _OPTIONS.items():
        group.addoption(name, default="", help=text)


def _option(config: pytest.Config, name: str) -> str:
    """Return the value of an option. The value is empty if the options are unknown, because pytest reads this
    file too late when it runs every test of the project.
    """
    return str(config.getoption(name, default="") or "")


def _channel(config: pytest.Config) -> grpc.aio.Channel:
    address = _option(config, "--picker")
    ca, cert, key = (_option(config, f"--picker-{part}") for part in ("ca", "cert", "key"))
    if not ca:
        return grpc.aio.insecure_channel(address)
    pair = (Path(key).read_bytes(), Path(cert).read_bytes()) if cert else (None, None)
    credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes(), *pair)
    name = _option(config, "--picker-server-name")
    return grpc.aio.secure_channel(
        address, credentials, options=[("grpc.ssl_target_name_override", name)] if name else None
    )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def picker(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    both_transports: None,  # noqa: F811 - the fixture
) -> AsyncIterator[PickerUnderTest]:
    """Return the picker under test as its users run it. No optional feature is on, unless the run asks for
    it.
    """
    if _option(request.config, "--picker") and transport() != "http2":
        pytest.skip("a picker given by address has one transport")
    if not _option(request.config, "--picker"):
        async with own_picker(tmp_path_factory.mktemp("picker")) as ours:
            yield ours
        return
    endpoints = _listed(_option(request.config, "--picker-endpoints"))
    assert len(endpoints) >= 2, "--picker-endpoints: name at least two ip:port"
    async with _channel(request.config) as channel:
        has = frozenset(_listed(_option(request.config, "--picker-has")))
        yield PickerUnderTest(channel=channel, endpoints=endpoints, has=has)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def flagged(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    both_transports: None,  # noqa: F811 - the fixture
) -> AsyncIterator[PickerUnderTest]:
    """Return the picker under test with every optional feature switched on."""
    if _option(request.config, "--picker"):
        yield request.getfixturevalue("picker")
        return
    directory = tmp_path_factory.mktemp("flagged")
    async with own_picker(directory, conformanceHeaders=True, scoresMetadata=True) as ours:
        yield ours


@pytest.fixture(scope="module")
def controllable(request: pytest.FixtureRequest) -> None:
    """Skip with a message if the run cannot control the picker."""
    if _option(request.config, "--picker"):
        pytest.skip(_CONTROL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ours(
    controllable: None,
    tmp_path_factory: pytest.TempPathFactory,
    both_transports: None,  # noqa: F811 - the fixture
) -> AsyncIterator[OwnPicker]:
    """Return our own picker with its admin address. The tests of a module share it, and each test leaves it
    as it was.
    """
    async with own_picker(tmp_path_factory.mktemp("ours")) as running:
        yield running


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each row: the requirement, its level, and the result of its tests."""
    outcomes: dict[int, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            number = row_of(getattr(report, "nodeid", ""))
            if number is not None:
                outcomes.setdefault(number, Counter())[outcome] += 1
    if not outcomes:
        return
    terminalreporter.section("endpoint picker conformance")
    for number, row in ROWS.items():
        count = outcomes.get(number, Counter())
        text = f"{number:>2}  {row.level:<12} {row.text:<72} {_result(count)}"
        terminalreporter.write_line(text, red=bool(count["failed"] or count["error"]))


def _result(count: Counter[str]) -> str:
    if count["failed"] or count["error"]:
        return f"FAIL ({count['failed'] + count['error']} of {count.total()})"
    if not count.total():
        return "not run"
    skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
    return f"pass ({count['passed']}{skipped})" if count["passed"] else f"skipped ({count['skipped']})"
