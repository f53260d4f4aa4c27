"""Defines the addresses at which the picker listens for Envoy and for people, and their certificates. Each
worker has its own addresses.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from epp.base.types import Address
from epp.config.strict import Strict


class Tls(Strict, frozen=True):
    """Certificates as PEM files. They are read at start and again when they change. Replace a file by
    renaming another file over it, because Envoy notices no other change.
    """

    cert_file: str
    """File with the certificate, followed by the intermediate certificates."""
    key_file: str
    """File with the private key of the certificate."""
    client_ca_file: str = ""
    """CA file. If set, clients must show a certificate that this CA has signed (mTLS)."""
    ca_file: str = ""
    """Only in `listen.tls`: file with the CA by which Envoy verifies the picker. Empty means `certFile`
    itself."""


class Listen(Strict, frozen=True):
    """The address at which the picker listens for Envoy."""

    address: str = "127.0.0.1:9002"
    """`ip:port`, or `unix:/path`. Each worker has an address of its own: the next port, or the path with `.N`
    added. Envoy may run as another user, so everybody may write to a socket: restrict access by the
    permissions of its directory."""
    transport: Literal["http2", "grpcio"] = "http2"
    """Server that carries the ext_proc streams. http2: the picker's own HTTP/2, on the event loop. grpcio:
    the server of the library grpcio, which takes two to three times the CPU, has no TLS, and does not notice
    that the picker is overloaded.
    """
    tls: Tls | None = None
    health_address: str = ""
    """`ip:port` of gRPC health without TLS, for probes that know no certificates. Empty: health is answered
    at `address` only. Needs the transport http2 and one worker."""

    def addresses(self, *, workers: int) -> tuple[str, ...]:
        """Return the address at which each worker listens. A single worker listens at `address` itself."""
        if workers == 1:
            return (self.address,)
        if self.address.startswith("unix:"):
            return tuple(f"{self.address}.{n}" for n in range(workers))
        return tuple(map(str, _row(Address.parse(self.address), workers)))


class Admin(Strict, frozen=True):
    """Address of metrics, health and decisions. Do not expose it to clients of the gateway."""

    address: str = "127.0.0.1:9090"
    """`ip:port`. Worker N listens on port + N."""
    hosts: Annotated[
        tuple[Annotated[str, Meta(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")], ...],
        Meta(max_length=64),
    ] = ()
    """DNS names by which clients may ask for the admin pages. IP addresses and `localhost` are always
    allowed. A request for any other name gets 421."""

    def addresses(self, *, workers: int) -> tuple[Address, ...]:
        """Return the admin address of each worker. Raise ValueError if there are not enough ports."""
        return _row(Address.parse(self.address), workers)


def _row(first: Address, count: int) -> tuple[Address, ...]:
    """Return `count` addresses with consecutive ports. Raise ValueError if the last port is too high."""
    if first.port + count - 1 > 65535:
        raise ValueError(
            f"{first}: {count} workers need {count} consecutive ports from this one on, and the highest port is 65535"
        )
    return tuple(Address(host=first.host, port=first.port + n) for n in range(count))
