"""`epp check` warns of the transport on which the picker does not learn that it is overloaded."""

from __future__ import annotations

import pytest

from epp.config.listening import Listen
from epp.config.settings import Config
from epp.serve.preflight import inspect


@pytest.mark.parametrize(("transport", "told"), [("http2", False), ("grpcio", True)])
def test_only_grpcio_gets_the_remark_about_overload(transport: str, *, told: bool) -> None:
    listen = Listen(address="127.0.0.1:9002", transport="grpcio" if transport == "grpcio" else "http2")
    remarks = inspect(Config(endpoints_file="endpoints.yaml", listen=listen))
    assert any("does not see that it is overloaded" in remark for remark in remarks) is told
