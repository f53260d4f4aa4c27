"""Rows 19 and 20: the models that servers have, aliases of models, and which server computes a prompt for
another.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from epp.tools.conformance.dataplane import BUFFERED, DUPLEX, Mode
from tests.conformance.modes import MODES, READING_MODES
from tests.conformance.picker import ALIAS, BODY, OwnPicker, PickerUnderTest, completion, picker_of_models

pytestmark = pytest.mark.asyncio(loop_scope="module")

every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
every_reading_mode = pytest.mark.parametrize("mode", READING_MODES.values(), ids=READING_MODES)
PREFILLER = "x-prefiller-host-port"
OBEYED = (
    PREFILLER,
    "x-prefiller-url",
    "X-LLM-D-Prefiller-Host-Port",
    "x-data-parallel-host-port",
    "x-encoder-hosts-ports",
)
NOWHERE = "203.0.113.9:80"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def of_models(
    controllable: None, tmp_path_factory: pytest.TempPathFactory, both_transports: None
) -> AsyncIterator[OwnPicker]:
    """Our own picker with an alias and a server that computes prompts."""
    async with picker_of_models(tmp_path_factory.mktemp("models")) as running:
        yield running


@every_reading_mode
async def test_row_19_a_model_that_no_server_has_is_404(of_models: OwnPicker, mode: Mode) -> None:
    """Once every server has listed its models, a request for another model gets 404 and no server."""
    refused = (await of_models.route(mode, completion(model="ghost"))).refused
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (404, "model_not_found")


@every_mode
async def test_row_19_all_models_are_listed_once(of_models: OwnPicker, mode: Mode) -> None:
    """The picker itself answers GET /v1/models: every model of every server, and every alias."""
    listed = (await of_models.route(mode, None, method="GET", path="/v1/models")).refused
    assert (listed.status, listed.headers["content-type"]) == (200, "application/json")
    assert [card["id"] for card in json.loads(listed.body)["data"]] == [ALIAS, "m"]


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX], ids=["buffered", "full_duplex"])
async def test_row_19_an_alias_goes_on_as_its_target(of_models: OwnPicker, mode: Mode) -> None:
    """Only the name changes in the body, and content-length gives the new length."""
    sent = completion(model=ALIAS)
    routed = await of_models.route(mode, sent, headers=[("content-length", str(len(sent)))])
    assert routed.request.body == completion(model="m")
    assert routed.request.values("content-length") in ([str(len(completion(model="m")))], [])


@every_mode
@pytest.mark.parametrize("body", [BODY, None], ids=["body", "no_body"])
async def test_row_20_a_client_names_no_server_to_call(
    picker: PickerUnderTest, mode: Mode, body: bytes | None
) -> None:
    """Some headers tell a server which server to call. The picker removes them if it does not write them
    itself.
    """
    routed = await picker.route(mode, body, headers=[(name, NOWHERE) for name in OBEYED])
    assert [name for name in OBEYED if routed.request.values(name.lower())] == []


@every_reading_mode
async def test_row_20_the_prefill_server_is_named(of_models: OwnPicker, mode: Mode) -> None:
    """If the servers that answer are busy, another server computes a long prompt. A client's header changes
    nothing.
    """
    async with AsyncExitStack() as stack:
        for n in range(4 * len(of_models.endpoints)):
            under_way = await stack.enter_async_context(of_models.exchange(mode))
            await under_way.send(completion(f"{n} is under way"))
        long = completion("".join(f"{mode} sentence {n} of a long prompt. " for n in range(2000)))
        routed = await of_models.route(mode, long, headers=[(PREFILLER, NOWHERE)])
    assert routed.request.values(PREFILLER) == [str(of_models.backends[-1].address)]
    assert set(routed.destinations) <= set(of_models.endpoints), "a prefill server is no destination"
