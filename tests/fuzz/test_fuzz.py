"""Generated input at all entries, four million bytes each. Errors are typed, the state stays valid, and
the memory does not grow.
"""

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.fuzz.cluster_objects import ClusterObjects
from tests.fuzz.data_plane import AccessLogMessages, Connections, ExtProcMessages, Transports
from tests.fuzz.entry import Entry
from tests.fuzz.files_and_pages import EndpointsFile, MetricsPages, ModelPages, PolicyFile
from tests.fuzz.hunting import HUNTED, hunt
from tests.fuzz.kv import KvEvents
from tests.fuzz.listening import LISTENING
from tests.fuzz.peers import PeerBatches
from tests.fuzz.run import feed

MEGABYTES = float(os.environ.get("PREFIX_GATEWAY_FUZZ_MEGABYTES", "4"))
"""Megabytes for each entry. Four take about a minute for all thirteen on one core."""
SEED = int(os.environ.get("PREFIX_GATEWAY_FUZZ_SEED", "1"))
INPUTS = 600
"""Inputs of each hunt for costly ones."""
ENTRIES: dict[str, Callable[[], Entry]] = {
    "http2": Connections,
    "transport": Transports,
    "ext_proc": ExtProcMessages,
    "access_log": AccessLogMessages,
    "metrics_page": MetricsPages,
    "model_page": ModelPages,
    "endpoints_file": EndpointsFile,
    "policy_file": PolicyFile,
    "peer_batches": PeerBatches,
    "kv_events": KvEvents,
    "api_server": ClusterObjects,
}
"""Entries that need no socket. The bytes go directly into the code that the edge calls."""


@pytest.mark.parametrize("name", [*ENTRIES, *LISTENING])
async def test_generated_input_is_taken_or_refused_and_leaves_the_picker_sound(
    name: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        listening = LISTENING.get(name)
        entry = await stack.enter_async_context(listening(tmp_path)) if listening else ENTRIES[name]()
        print(name, await feed(name, entry, seed=SEED, size_bytes=int(MEGABYTES * 1e6)))


@pytest.mark.parametrize("name", HUNTED)
async def test_no_input_runs_more_lines_than_its_size_allows(name: str) -> None:
    worst = await hunt(name, ENTRIES[name](), seed=SEED, inputs=INPUTS)
    assert worst.share <= 1, (worst.lines, len(worst.data), worst.data[:300])
