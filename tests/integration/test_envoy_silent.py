"""A data plane does not tell the picker its body modes. `epp serve` then assumes the modes of its
configuration. These tests send Envoy's messages without an Envoy, because the Envoy of these tests always
tells its modes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from envoy.service.ext_proc.v3 import external_processor_pb2, external_processor_pb2_grpc

from tests.harness.gateway import config_in, running_picker, write_policy

BODY = json.dumps({"model": "m", "prompt": "hello"}).encode()
BUFFERED = {"assumedModes": {"requestBody": "BUFFERED", "responseBody": "NONE"}}


def processing_request(**parts: Any) -> Any:
    return external_processor_pb2.ProcessingRequest(**parts)


def headers_part(**values: str) -> Any:
    listed = [{"key": key.replace("_", ":", 1), "raw_value": value.encode()} for key, value in values.items()]
    return {"headers": {"headers": listed}}


async def answers(directory: Path, streams: dict[str, Any]) -> tuple[Any, Any]:
    """Return what a picker that samples every answer replies to a request body and to the response
    headers.
    """
    config = config_in(directory, policyFile=str(directory / "policy.yaml"), streams=streams)
    write_policy(config, {"sampling": {"share": 1}})
    endpoints = {"endpoints": [{"name": "a", "address": "127.0.0.1:1"}]}
    Path(config.endpoints_file).write_text(yaml.safe_dump(endpoints))
    async with (
        running_picker(config, directory=directory),
        grpc.aio.insecure_channel(config.listen.address) as channel,
    ):
        call: Any = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process()
        await call.write(
            processing_request(request_headers=headers_part(_method="POST", _path="/v1/completions"))
        )
        await call.write(processing_request(request_body={"body": BODY, "end_of_stream": True}))
        told = await call.read()
        if told.HasField("request_headers"):
            told = await call.read()
        await call.write(processing_request(response_headers=headers_part(_status="200")))
        at_response = await call.read()
        call.cancel()
        return told, at_response


async def test_a_data_plane_that_tells_no_modes_is_assumed_to_use_full_duplex(tmp_path: Path) -> None:
    told, _ = await answers(tmp_path, {})
    assert told.request_body.response.body_mutation.streamed_response.body == BODY


@pytest.mark.parametrize("override", [True, False])
async def test_a_data_plane_that_tells_no_modes_is_assumed_to_use_those_of_the_configuration(
    tmp_path: Path, *, override: bool
) -> None:
    told, at_response = await answers(tmp_path, {**BUFFERED, "modeOverride": override})
    assert not told.request_body.response.HasField("body_mutation")
    assert told.request_body.response.header_mutation.set_headers
    assert at_response.HasField("response_headers")
    assert at_response.HasField("mode_override") == override
