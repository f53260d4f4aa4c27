"""The transport on which the pickers of a test run: our own HTTP/2, except in
`tests/conformance`, which runs on both.

Every picker that the harness starts, in this process or another, gets `listen.transport` from here. `make
run` imports this module, so it does without pytest.
"""

import os
from typing import Final, Literal, cast

VARIABLE: Final = "PREFIX_GATEWAY_TEST_TRANSPORT"
TransportName = Literal["http2", "grpcio"]


def transport() -> TransportName:
    """Return the transport that is in use now."""
    return cast("TransportName", os.environ.get(VARIABLE, "http2"))
