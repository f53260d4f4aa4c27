"""A self-signed certificate for tests: for localhost and 127.0.0.1, valid from 2020 to 2120, its own CA.

The key protects nothing. `make_certificate` makes others.
"""

import os
import subprocess
from pathlib import Path
from typing import Final

from epp.config.sections import Tls

CERTIFICATE: Final = """\
-----BEGIN CERTIFICATE-----
MIIBbTCCAROgAwIBAgIBATAKBggqhkjOPQQDAjAXMRUwEwYDVQQDDAxnYXRld2F5
LnRlc3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBcxFTATBgNV
BAMMDGdhdGV3YXkudGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABJsZv32/
7UgoHIVaAih3rfL5vhFXM2m6d9vgK0kDsHJsiBLKZBkpnbKOdNuEqBlnr8v/1Wim
OtRZ8g1ULY6Lg2ejTjBMMBoGA1UdEQQTMBGCCWxvY2FsaG9zdIcEfwAAATAPBgNV
HRMBAf8EBTADAQH/MB0GA1UdDgQWBBQtsFbI13KYHSt99F4ELdJnsSrEGDAKBggq
hkjOPQQDAgNIADBFAiEAmm8Efd2Rs4ZjgbqMKqvyUMBiqZrzqnYi6gVYoWRF/Q4C
ID9Bl8wnpyUWLIZIUK6sL38akOAHbfUa371M5YhdtiK5
-----END CERTIFICATE-----
"""

PRIVATE_KEY: Final = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgPxZRvPt2VMFqbeni
t75WGJeixg8NLJjqI/F7HLETzguhRANCAASbGb99v+1IKByFWgIod63y+b4RVzNp
unfb4CtJA7BybIgSymQZKZ2yjnTbhKgZZ6/L/9VopjrUWfINVC2Oi4Nn
-----END PRIVATE KEY-----
"""


def write_tls(directory: Path, *, mutual: bool = False) -> Tls:
    """Write the pair to files in `directory`. Return the configuration that names them."""
    cert, key = directory / "tls.crt", directory / "tls.key"
    cert.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    return Tls(cert_file=str(cert), key_file=str(key), client_ca_file=str(cert) if mutual else "")


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the files of a new certificate and its key, for the same names."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -addext"
    names = ["subjectAltName=DNS:localhost,IP:127.0.0.1", "-subj", f"/CN={name}"]
    command = [*made.split(), *names, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def replace_file(source: Path, target: Path) -> None:
    """Replace a file by rename, as a renewal does."""
    fresh = target.with_suffix(".new")
    fresh.write_bytes(source.read_bytes())
    os.replace(fresh, target)  # noqa: PTH105 - the atomic rename is the point
