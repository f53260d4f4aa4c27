"""The configuration and OpenTelemetry's own variables turn tracing on or off and give its bounds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from epp.base.errors import ConfigError
from epp.observe.tracing import start
from epp.observe.tracing.tracer import Tracer
from tests.unit.observe.telemetry.records import began, ended, pick


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, True),
        ({"OTEL_SDK_DISABLED": " TRUE "}, False),
        ({"OTEL_SDK_DISABLED": "false"}, True),
        ({"OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_the_environment_may_turn_off_what_the_configuration_turns_on(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *, on: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert start.on(True) is on
    assert start.on(False) is False


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("OTEL_TRACES_EXPORTER", "jaeger", "'jaeger' is not known here; set otlp or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier", "set one of grpc, http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier", "set one of grpc, http/protobuf"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named_before_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, fault: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"tracing: {name}: .*{fault}") as caught:
        start.require(True)
    assert len(str(caught.value)) < 200


def test_invalid_variables_are_ignored_if_tracing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "none")
    start.require(False)


def test_bounds_that_the_batch_processor_refuses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with pytest.raises(ConfigError, match=r"tracing: OTEL_BSP_.*max_queue_size must be"):
        start.processor_of(PatientCollector())


def test_importing_this_module_loads_nothing_of_opentelemetry() -> None:
    code = "import epp.observe.tracing.start, sys; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


class PatientCollector(SpanExporter):
    """Answers a batch when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.free = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.free.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.free.set()


def tracer_to(collector: SpanExporter, monkeypatch: pytest.MonkeyPatch) -> Tracer:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    return Tracer(TracerProvider(ALWAYS_ON, shutdown_on_exit=False), start.processor_of(collector))


def send_one(tracer: Tracer) -> None:
    made = pick()
    tracer.on_event(began(made))
    tracer.on_event(ended(made))


async def test_tracing_stops_although_the_collector_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = PatientCollector()
    tracer = tracer_to(collector, monkeypatch)
    send_one(tracer)
    assert collector.asked.wait(10)
    await start.stop(tracer.processor)
    assert collector.free.is_set(), "the sending was ended"
