"""The charts under helm 3, which many clusters still use. helm 3 renders the same objects as helm 4, and its
upgrades do not touch what others own.
"""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.charts.rendering import VALUE_SETS, Helm, ValueSet
from tests.cluster_env import environment

pytest_plugins = ["tests.charts.fixtures"]
pytestmark = pytest.mark.cluster

BY_NAME = pytest.mark.parametrize("wanted", VALUE_SETS, ids=lambda each: each.name)
MADE_ANEW: Final = re.compile(r"(password: |checksum/password: |tls\.(?:crt|key): ).*")


@pytest.fixture(scope="session")
def helm3(helm: Helm) -> Helm:
    """Return helm 3. The fixture asks for `helm` first, so the test is skipped if the cluster's tools are
    missing.
    """
    found = Helm(environment.helm3(progress=print))
    assert found.run("version", "--short").startswith("v3.")
    assert helm.run("version", "--short").startswith("v4.")
    return found


@BY_NAME
def test_both_helms_make_the_same_objects(helm: Helm, helm3: Helm, wanted: ValueSet) -> None:
    texts = [
        sorted(MADE_ANEW.sub(r"\1", part).strip() for part in text.split("\n---\n"))
        for text in (each.text(wanted.chart, wanted.values, release=wanted.release) for each in (helm, helm3))
    ]
    assert texts[0] == texts[1]
