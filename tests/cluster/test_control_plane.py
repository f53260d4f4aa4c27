"""The tools of the control plane that the cluster tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster_env import environment


def test_missing_tools_name_the_command_that_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(environment.ClusterToolsError, match=r"python -m tests\.cluster_env build"):
        environment.require()
