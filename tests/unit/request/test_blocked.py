"""Which paths are refused, and that the check is cheap. For the list itself see
tests/contract/test_blocked_paths.py.
"""

from __future__ import annotations

import pytest

from epp.request.blocked import BlockedPaths
from epp.request.parse import API_PATHS

BLOCKED = BlockedPaths(("/metrics", "/inference/v1/abort_requests"))


@pytest.mark.parametrize(
    "target",
    ["", "*", "/", "/metri", "/v1/metrics", "/v1/models/a%20b", "/x?/../metrics", "/x?a=/metrics", "/inference/v1/generate", "/../x",
     "/." + "a" * 2046, "/" + "a" * 100_000, "/x?" + "a" * 100_000, "/v1/models/%zz%", "http://metrics/v1"],
)  # fmt: skip
def test_other_paths_are_not_refused(target: str) -> None:
    assert not BLOCKED.refuse(target)


@pytest.mark.parametrize("prefix", ["/v1/embeddings", "/V1/Chat", "/v1", "/"])
def test_a_path_of_an_api_is_allowed_unless_it_is_blocked(prefix: str) -> None:
    blocked = BlockedPaths((prefix,))
    assert blocked.open_apis < API_PATHS
    assert {path for path in API_PATHS if not blocked.refuse(path)} == blocked.open_apis


def test_an_empty_list_refuses_nothing() -> None:
    assert not any(BlockedPaths(()).refuse(target) for target in ("/metrics", "/%6d", "/." + "a" * 5_000))
