"""How many connections the ext_proc port accepts depends on the number of file descriptors."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from epp.transport.listening_socket import max_peers


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("files", "peers"), [(600, 300), (300, 44), (256, 1)])
def test_the_limit_of_connections_leaves_descriptors_for_other_files(files: int, peers: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    assert max_peers() == peers
