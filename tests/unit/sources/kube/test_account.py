"""The account that a token belongs to, so that the lease can belong to the account."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from epp.sources.kube.account import owner


def token(folder: Path, claims: Any) -> Path:
    """Return a token as it is mounted: three parts without padding, of which only the second is read."""
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    path = folder / "token"
    path.write_text(f"eyJhbGciOiJFUzI1NiJ9.{payload}.c2lnbmF0dXJl")
    return path


def claims(namespace: str = "models") -> dict[str, Any]:
    place = {
        "namespace": namespace,
        "pod": {"name": "gateway-1", "uid": "p"},
        "serviceaccount": {"name": "gateway", "uid": "u"},
    }
    return {"iss": "https://kubernetes.default.svc", "kubernetes.io": place, "exp": 1}


def test_the_account_of_a_token_owns_objects_of_its_namespace(tmp_path: Path) -> None:
    found = owner(token(tmp_path, claims()), namespace="models")
    assert found == {"apiVersion": "v1", "kind": "ServiceAccount", "name": "gateway", "uid": "u"}


def test_an_account_of_another_namespace_owns_nothing(tmp_path: Path) -> None:
    assert owner(token(tmp_path, claims("elsewhere")), namespace="models") is None


@pytest.mark.parametrize("found", [{}, {"kubernetes.io": {}}, [], "text"])
def test_a_token_that_names_no_account_gives_no_owner(tmp_path: Path, found: Any) -> None:
    assert owner(token(tmp_path, found), namespace="models") is None


@pytest.mark.parametrize("text", ["", "a.b", "a.%%%.c", "a.AAAA.c", "\u00e9.\u00e9.\u00e9"])
def test_a_file_that_is_not_a_token_gives_no_owner(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    assert owner(path, namespace="models") is None
    assert owner(tmp_path / "nothing", namespace="models") is None
