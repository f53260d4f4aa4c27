"""Decides whether and how traces are sent, from the switch in the configuration and OpenTelemetry's own
environment variables.

If tracing is off, nothing of OpenTelemetry is imported. Called by the composition root.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Final

from epp.base.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    from epp.observe.tracing.tracer import Tracer

_EXPORTERS: Final = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_LAST_SENDING_S: Final = 2.0


def on(tracing: bool) -> bool:  # noqa: FBT001 - the configuration's switch
    """Return whether to trace. `OTEL_SDK_DISABLED` and `OTEL_TRACES_EXPORTER=none` turn off tracing that is
    configured.
    """
    if not tracing or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if name not in ("otlp", "none"):
        raise ConfigError(f"tracing: OTEL_TRACES_EXPORTER: {name!r} is not known here; set otlp or none")
    return name == "otlp"


def require(tracing: bool) -> None:  # noqa: FBT001 - the configuration's switch
    """Check that tracing can start. The ConfigError says which package or variable is at fault."""
    if not on(tracing):
        return
    for package in ("opentelemetry.sdk.trace", _EXPORTERS[_protocol()]):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"tracing: the package {error.name or package} is not installed: pip install 'prefix-gateway[tracing]'"
            ) from error


def make(*, worker: int) -> Tracer:
    """Return a listener that sends spans. Raises ConfigError if a variable cannot be used."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415

    from epp.observe.tracing.tracer import Tracer  # noqa: PLC0415

    try:
        exporter = importlib.import_module(_EXPORTERS[_protocol()]).OTLPSpanExporter()
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"tracing: OTEL_EXPORTER_OTLP_*: {error}") from error
    usual = {"service.name": "prefix-gateway", "service.instance.id": f"{socket.gethostname()}-{worker}"}
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES may replace these two
    resource = Resource.create(dict(usual)).merge(OTELResourceDetector().detect())
    return Tracer(TracerProvider(resource=resource, shutdown_on_exit=False), processor_of(exporter))


def processor_of(exporter: SpanExporter) -> BatchSpanProcessor:
    """Return OpenTelemetry's batch processor, which reads OTEL_BSP_*. It sends from its own thread."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - an extra

    try:
        return BatchSpanProcessor(exporter)
    except ValueError as error:
        raise ConfigError(f"tracing: OTEL_BSP_*: {error}") from error


async def stop(processor: BatchSpanProcessor) -> None:
    """Give the last spans a moment to arrive. A collector that is away does not delay the end for longer."""
    # A daemon: a collector that hangs cannot keep the process from ending.
    last = threading.Thread(target=processor.shutdown, name="last spans", daemon=True)
    last.start()
    await asyncio.to_thread(last.join, _LAST_SENDING_S)
    if last.is_alive():
        processor.span_exporter.shutdown()


def _protocol() -> str:
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if value := os.environ.get(variable, "").strip():
            if value not in _EXPORTERS:
                raise ConfigError(f"tracing: {variable}: {value!r}; set one of {', '.join(_EXPORTERS)}")
            return value
    return "grpc"
