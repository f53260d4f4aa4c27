"""Defines the names that the generated bootstrap, the endpoints file and the picker's protocol agree on."""

from __future__ import annotations

from typing import Final

MODEL_SERVERS: Final = "model-servers"
"""Cluster of the model servers. The endpoints file has this name too."""

PICKER: Final = "picker"
"""Cluster of the picker's workers."""

COLLECTOR: Final = "collector"
"""Cluster of the collector of Envoy's own spans."""

STAT_PREFIX: Final = "gateway"
"""Envoy's counters of the listener are `http.gateway.*`, and those of the picker are
`http.gateway.ext_proc.*`."""

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Header and metadata key of the pick."""

PATH: Final = "%PATH(NQ)%"
"""The path without its query, for logs and spans, because some clients put their key into the query."""

LB_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"

PICKER_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
"""gRPC service of the picker, also used for its health check."""
