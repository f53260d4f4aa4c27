"""Endpoints for the tests of this folder: each name of one letter has an address of its own."""

from collections.abc import Sequence

from epp.base.types import Address, Endpoint, EndpointName


def endpoint(
    name: str,
    *,
    host: str = "",
    model: str = "",
    pool: str = "",
    adapters: Sequence[str] = (),
    incarnation: str = "",
) -> Endpoint:
    return Endpoint(
        EndpointName(name),
        Address(host or f"10.0.0.{ord(name)}", 8000),
        model=model,
        pool=pool,
        adapters=frozenset(adapters),
        incarnation=incarnation,
    )
