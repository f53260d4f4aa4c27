"""The pieces of Envoy's messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from epp.serve.envoy.messages import absolute, directory_of, seconds


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.0, "1s"), (0.0, "0s"), (0.25, "0.25s"), (3600.0, "3600s"), (1e-6, "0.000001s"), (1 / 3, "0.333333s")],
)
def test_a_duration_has_no_exponent_and_no_zeros_at_its_end(number: float, text: str) -> None:
    assert seconds(number) == text


def test_symbolic_links_in_a_path_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    assert absolute("link/tls.crt") == f"{tmp_path}/link/tls.crt"
    assert directory_of(absolute("link/tls.crt")) == {"path": f"{tmp_path}/link"}
