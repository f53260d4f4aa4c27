"""A certificate that cannot be used is noticed before a handshake fails."""

import contextlib
import random
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest

from epp.base.errors import ConfigError
from epp.sources.files.watch import CertificateWatch, check_tls
from tests.harness.certificate import CERTIFICATE, write_tls

IN_2026 = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
IN_2121 = datetime(2121, 1, 1, tzinfo=UTC).timestamp()


def test_a_pair_that_fits_can_be_used_until_it_expires(tmp_path: Path) -> None:
    tls = write_tls(tmp_path)
    check_tls(tls, field="listen.tls", unix_now_s=IN_2026)
    with pytest.raises(ConfigError, match=r"listen\.tls\.certFile: .*expired at 2120-01-01 00:00 UTC"):
        check_tls(tls, field="listen.tls", unix_now_s=IN_2121)


def test_a_damaged_certificate_is_refused_or_passes(tmp_path: Path) -> None:
    tls = write_tls(tmp_path)
    der, rng = ssl.PEM_cert_to_DER_cert(CERTIFICATE), random.Random(1)
    for _ in range(300):
        broken = bytearray(der[: rng.randrange(len(der))] if rng.random() < 0.5 else der)
        for _ in range(rng.randrange(1, 4)):
            if broken:
                broken[rng.randrange(len(broken))] = rng.randrange(256)
        Path(tls.cert_file).write_text(ssl.DER_cert_to_PEM_cert(bytes(broken)))
        with contextlib.suppress(ConfigError):
            check_tls(tls, field="listen.tls", unix_now_s=IN_2026)


async def test_a_change_to_a_bad_pair_and_its_repair_are_each_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = write_tls(tmp_path)
    results: list[bool] = []
    watch = CertificateWatch(tls, results.append)
    await watch.look()
    Path(tls.key_file).write_text("half of a k")
    await watch.look()
    await watch.look()
    write_tls(tmp_path)
    await watch.look()
    assert results == [True, False, True]
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "listen.tls.keyFile" in line
