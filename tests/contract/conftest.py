"""What several files of recordings need."""

import pytest

from tests.contract.recordings import KvEventRecording, read_kv_events


@pytest.fixture(params=["sha256", "sha256_cbor"])
def recording(request: pytest.FixtureRequest) -> KvEventRecording:
    return read_kv_events(request.param)
