"""What each gateway reads and does, as far as the picker has to know it:
one profile for each name of `dialect`.

Pure. `settings` holds the name; the composition root and `epp check` ask for the profile. docs/protocol.md
has the same table for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

DialectName = Literal["auto", "envoy", "envoy-gateway", "istio", "ai-gateway", "agentgateway", "nginx", "gke"]

Timeouts = Literal["extendable", "fixed", "none", "unknown"]
"""How long a gateway waits for a pick.

`extendable`: the picker asks for more time, up to `envoy.maxMessageTimeoutSeconds`. `fixed`:
`envoy.messageTimeoutSeconds`, and no more. `none`: as long as it takes, since bodies come in full duplex.
`unknown`: as for buffered bodies, with a time-out that the picker does not know.
"""

WAIT_SHARE: Final = 0.9
"""Of the time that a gateway waits for a pick, what a request may spend in the queue of flow control."""

MOST_DESTINATIONS: Final = 8
"""The most that a policy may ask for."""


class Dialect(Struct, frozen=True):
    """What one gateway does with the answers of the picker."""

    reads_list: bool
    """A comma list of destinations is an ordered fallback.
    False: the gateway takes the value for one address, and a list fails."""
    fails_closed: bool = False
    """A dead picker cuts every answer whose stream it holds."""
    shows_path: bool = True
    shows_answers: bool = True
    """The ext_proc stream lives as long as the HTTP request. False: it ends once the gateway has the pick."""
    own_config: bool = False
    """The gateway may be the Envoy of `epp envoy-config`."""
    timeouts: Timeouts = "unknown"
    """What bounds the time that the gateway waits for a pick."""
    by_pool: bool = True
    """The gateway finds the picker through an InferencePool, which names one port."""

    @property
    def max_destinations(self) -> int:
        return MOST_DESTINATIONS if self.reads_list else 1


UNKNOWN: Final = Dialect(reads_list=False)
"""What is safe with every gateway."""

DIALECTS: Final[Mapping[str, Dialect]] = {
    "envoy": Dialect(reads_list=True, own_config=True, by_pool=False, timeouts="extendable"),
    "envoy-gateway": Dialect(reads_list=True, by_pool=False, timeouts="fixed"),
    "istio": Dialect(reads_list=True, timeouts="none"),
    "ai-gateway": Dialect(reads_list=False, fails_closed=True, timeouts="none"),
    "agentgateway": Dialect(reads_list=False, timeouts="none"),
    "nginx": Dialect(reads_list=False, shows_path=False, shows_answers=False),
    "gke": Dialect(reads_list=True, timeouts="none"),
}


def dialect_of(name: DialectName, *, own_envoy: bool) -> Dialect:
    """The profile of a name.
    own_envoy: the picker writes the endpoints file of an Envoy, which `auto` takes for our own.
    """
    if name == "auto":
        return DIALECTS["envoy"] if own_envoy else UNKNOWN
    return DIALECTS[name]
