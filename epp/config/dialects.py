"""Describes each gateway to the picker: one profile for each name of `dialect`.

Pure. `settings` holds the name, and `Config.caller` is the profile. docs/protocol.md has the same table for
people.
"""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

DialectName = Literal["auto", "envoy", "envoy-gateway", "istio", "ai-gateway", "agentgateway", "nginx", "gke"]
Timeouts = Literal["extendable", "fixed", "none", "unknown"]
"""How long a gateway waits for a pick.

`extendable`: the picker may ask for more time, up to `envoy.maxMessageTimeoutSeconds`. `fixed`: the gateway
waits for `envoy.messageTimeoutSeconds` and no longer. `none`: the gateway has no time-out, since bodies come
in full duplex. `unknown`: the gateway buffers bodies and has a time-out that the picker does not know.
"""

WAIT_SHARE: Final = 0.9
"""A request may spend this share of the time that its gateway waits for a pick in the queue of flow
control.
"""

MOST_DESTINATIONS: Final = 8
"""The most destinations that a policy may ask for."""


class Dialect(Struct, frozen=True):
    """How one gateway uses the answers of the picker."""

    max_destinations: int = 1
    """Over 1: the gateway reads a comma-separated list of destinations and tries them in this order. 1: the
    gateway reads the value as one address, and a list fails.
    """
    fails_closed: bool = False
    """Whether a dead picker cuts every answer whose stream it held."""
    body_only: bool = False
    """Whether the gateway shows the picker neither path nor answer: it ends the ext_proc stream once it has
    the pick.
    """
    own_config: bool = False
    """Whether the gateway may be the Envoy of `epp envoy-config`."""
    timeouts: Timeouts = "unknown"
    """How the gateway limits the time that it waits for a pick."""
    by_pool: bool = True
    """Whether the gateway finds the picker through an InferencePool, which names one port."""


UNKNOWN: Final = Dialect()
"""The profile that is safe with every gateway."""

DIALECTS: Final[Mapping[str, Dialect]] = {
    "envoy": Dialect(MOST_DESTINATIONS, own_config=True, by_pool=False, timeouts="extendable"),
    "envoy-gateway": Dialect(MOST_DESTINATIONS, by_pool=False, timeouts="fixed"),
    "istio": Dialect(MOST_DESTINATIONS, timeouts="none"),
    "ai-gateway": Dialect(fails_closed=True, timeouts="none"),
    "agentgateway": Dialect(timeouts="none"),
    "nginx": Dialect(body_only=True),
    "gke": Dialect(MOST_DESTINATIONS, timeouts="none"),
}
