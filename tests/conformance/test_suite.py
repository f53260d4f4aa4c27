"""The suite itself: every row has tests and a line in the reference page, and the tests notice each fault of
a picker.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from epp.tools.conformance.dataplane import BUFFERED, DUPLEX, MAX_PIECE_BYTES
from tests.conformance import test_choice as choice
from tests.conformance import test_health as health
from tests.conformance import test_modes as modes
from tests.conformance import test_refusals as refusals
from tests.conformance.faults import FAULTS, Fault, faulty
from tests.conformance.modes import EARLY
from tests.conformance.picker import BODY, PickerUnderTest
from tests.conformance.rows import ROWS, row_of

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "protocol.md"
DRIVER = HERE.parents[1] / "epp" / "tools" / "conformance" / "dataplane.py"
Check = Callable[[PickerUnderTest], Awaitable[None]]


async def reads_the_body(picker: PickerUnderTest) -> None:
    pinned = modes.Pinned()
    for mode in (BUFFERED, EARLY, DUPLEX):  # one fault alone could find every prompt's endpoint by chance
        await modes.test_row_17_every_body_mode_finds_the_same_endpoint(picker, pinned, mode)


def sends_back(size: int) -> Check:
    test = modes.test_row_02_the_body_comes_back_byte_for_byte_in_pieces_that_fit
    return lambda picker: test(picker, DUPLEX, size)


NOTICED: dict[str, list[Check]] = {
    "body is never read": [
        reads_the_body,
        lambda p: refusals.test_row_12_a_request_that_no_server_could_take_is_400(p, DUPLEX, "no messages"),
    ],
    "comma string is no subset": [
        lambda p: choice.test_row_03_a_subset_in_one_comma_string_binds(p, BODY, ", ")
    ],
    "subset ignored": [
        lambda p: choice.test_row_03_a_subset_list_binds(p, BUFFERED, BODY),
        choice.test_row_03_the_port_counts,
        choice.test_row_05_fallbacks_stay_within_the_subset,
    ],
    "subset ignored without a body": [lambda p: choice.test_row_03_a_subset_list_binds(p, DUPLEX, None)],
    "empty subset ignored": [lambda p: choice.test_row_03_no_eligible_endpoint_is_503(p, BUFFERED, BODY, [])],
    "test header ignored": [lambda p: choice.test_row_10_the_test_header_steers_the_pick(p, DUPLEX, BODY)],
    "names in lower case only": [
        lambda p: modes.test_row_15_names_in_any_case_and_either_kind_of_value(p, plain_values=False),
        choice.test_row_15_the_values_of_a_repeated_header_are_one_list,
    ],
    "no metadata": [lambda p: choice.test_row_04_header_and_metadata_say_the_same(p, DUPLEX, BODY)],
    "metadata differs": [lambda p: choice.test_row_04_header_and_metadata_say_the_same(p, DUPLEX, None)],
    "one destination": [
        lambda p: choice.test_row_05_the_pick_is_a_list_of_different_endpoints(p, DUPLEX, BODY)
    ],
    "the same destination twice": [
        lambda p: choice.test_row_05_the_pick_is_a_list_of_different_endpoints(p, DUPLEX, BODY)
    ],
    "IPv6 without brackets": [choice.test_row_03_ipv6_addresses_match_in_brackets],
    "client's header kept": [
        lambda p: choice.test_row_11_a_destination_that_the_client_sends_is_gone(
            p, DUPLEX, BODY, "X-Gateway-Destination-Endpoint"
        )
    ],
    "request id replaced": [lambda p: choice.test_row_16_a_request_id_is_kept_or_made(p, BUFFERED, BODY)],
    "500 for everything": [
        lambda p: choice.test_row_03_no_eligible_endpoint_is_503(p, BUFFERED, None, "203.0.113.1:1"),
        lambda p: refusals.test_row_12_a_request_that_no_server_could_take_is_400(p, EARLY, "not JSON"),
    ],
    "errors in plain text": [
        lambda p: refusals.test_row_12_a_request_that_no_server_could_take_is_400(p, BUFFERED, "JSON cut off")
    ],
    "request a byte short": [sends_back(MAX_PIECE_BYTES), sends_back(400_000)],
    "response a byte short": [
        lambda p: modes.test_row_02_the_answer_passes_through_unchanged(p, DUPLEX, trailers=True)
    ],
    "every piece ends the body": [
        sends_back(400_000),
        lambda p: modes.test_row_02_before_trailers_no_body_piece_ends_the_stream(p, DUPLEX),
    ],
    "streams end in an error": [
        lambda p: modes.test_row_01_a_request_is_routed_and_its_stream_ends_well(p, BUFFERED)
    ],
    "health by the letter of gRPC": [
        lambda p: health.test_row_08_health_answers_under_its_names(p, "liveness"),
        health.test_row_08_an_unknown_service_is_called_unknown,
        lambda p: health.test_row_08_watch_sends_the_status_at_once_and_stays_open(p, "readiness"),
    ],
}


@pytest.mark.usefixtures("controllable")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", FAULTS)
async def test_a_faulty_picker_is_noticed(flagged: PickerUnderTest, name: str) -> None:
    async with faulty(flagged, FAULTS[name]) as picker:
        for check in NOTICED[name]:
            with pytest.raises((AssertionError, grpc.aio.AioRpcError)):
                await check(picker)


@pytest.mark.usefixtures("controllable")
@pytest.mark.asyncio(loop_scope="module")
async def test_the_proxy_adds_no_fault_of_its_own(flagged: PickerUnderTest) -> None:
    async with faulty(flagged, Fault()) as picker:
        for check in (check for checks in NOTICED.values() for check in checks):
            await check(picker)


def row_tests() -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the names of all tests of a row."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for path in HERE.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and row_of(node.name) is not None:
                assert node.name not in found, f"{node.name} is in two files"
                found[node.name] = node
    return found


def test_every_row_has_tests_and_each_says_its_rule() -> None:
    tests = row_tests()
    assert {row_of(name) for name in tests} == set(ROWS)
    assert [name for name, node in tests.items() if not ast.get_docstring(node)] == []


def test_the_reference_page_has_every_row_and_names_tests_that_exist() -> None:
    lines = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \| (.+?) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert [(int(number), level) for number, level, _, _ in lines] == [
        (number, row.level) for number, row in ROWS.items()
    ]
    tests = row_tests()
    for number, _, _, proof in lines:
        named = re.findall(r"`(\w+)`", proof)
        assert named, f"row {number} names no test"
        for part in named:
            full = f"test_row_{int(number):02}_{part}"
            assert any(name.startswith(full) for name in tests), f"row {number}: no test {full}"


def test_the_driver_knows_no_picker() -> None:
    """The driver may import only the wire protocol: its verdict on another picker must not depend on our
    code.
    """
    imported: set[str] = set()
    for node in ast.walk(ast.parse(DRIVER.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert "grpc" in imported
    assert not {name for name in imported if name.split(".")[0] in ("epp", "model_server", "tests")}
