"""Which hash secret the pickers of a pool agree on."""

import pytest

from epp.config.policy import Chunks
from epp.picker.prefix_index.secret import HashSecret, derived
from epp.picker.server_caches import Roots

ONE, OTHER = HashSecret(b"1" * 32, made_here=True), HashSecret(b"2" * 32, made_here=True)


def test_a_generated_secret_is_replaced_by_another_pickers_secret() -> None:
    assert ONE.agreed(OTHER.shown()) == OTHER
    assert ONE.agreed(ONE.shown()) == ONE


@pytest.mark.parametrize("shown", [b"", b"made:", b"made:short", b"made:" + b"x" * 5000, b"given:x", b"\xff"])
def test_bytes_that_are_not_a_secret_are_not_accepted(shown: bytes) -> None:
    assert ONE.agreed(shown) is None
    assert derived(b"file").agreed(shown) is None


def test_configured_secret_is_never_replaced_and_only_its_digest_is_shown() -> None:
    given = derived(b"file")
    assert given.agreed(given.shown()) == given
    assert given.agreed(ONE.shown()) is None
    assert given.agreed(derived(b"another file").shown()) is None
    assert given.key not in given.shown()


def test_the_seed_of_hashes_depends_on_the_secret() -> None:
    schedule = Chunks()
    seeds = {
        Roots(schedule, secret=s.key).seed(model="m") for s in (ONE, OTHER, derived(b"file"), HashSecret())
    }
    assert len(seeds) == 4
    roots = Roots(schedule, secret=ONE.key)
    assert roots.fingerprint != f"{roots.seed(model=''):016x}", (
        "the fingerprint of a secret is not a hash that the table uses"
    )
