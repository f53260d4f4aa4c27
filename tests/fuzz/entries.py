"""The picker's entries that need no socket. The bytes go directly into the code that the edge calls."""

from collections.abc import Callable

from tests.fuzz.cluster_objects import ClusterObjects
from tests.fuzz.data_plane import AccessLogMessages, Connections, ExtProcMessages, Transports
from tests.fuzz.entry import Entry
from tests.fuzz.files_and_pages import EndpointsFile, MetricsPages, ModelPages, PolicyFile
from tests.fuzz.kv import KvEvents
from tests.fuzz.peers import PeerBatches

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
