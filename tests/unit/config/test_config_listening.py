"""The addresses of the workers, for Envoy and for people."""

from __future__ import annotations

import pytest

from epp.config.listening import Admin, Listen


@pytest.mark.parametrize(
    ("address", "workers", "expected"),
    [
        ("unix:/run/p.sock", 1, ("unix:/run/p.sock",)),
        ("unix:/run/p.sock", 2, ("unix:/run/p.sock.0", "unix:/run/p.sock.1")),
        ("10.0.0.1:9002", 1, ("10.0.0.1:9002",)),
        ("[fd00::1]:9002", 3, ("[fd00::1]:9002", "[fd00::1]:9003", "[fd00::1]:9004")),
    ],
)
def test_each_worker_has_its_own_address(address: str, workers: int, expected: tuple[str, ...]) -> None:
    assert Listen(address=address).addresses(workers=workers) == expected


def test_each_worker_has_its_own_admin_address() -> None:
    assert [str(a) for a in Admin(address="[::1]:9090").addresses(workers=2)] == ["[::1]:9090", "[::1]:9091"]


@pytest.mark.parametrize("section", [Listen(address="127.0.0.1:65535"), Admin(address="127.0.0.1:65535")])
def test_ports_that_do_not_exist_are_refused(section: Listen | Admin) -> None:
    assert len(section.addresses(workers=1)) == 1
    with pytest.raises(ValueError, match="2 workers need 2 consecutive ports"):
        section.addresses(workers=2)
