"""What a test gets that needs something built beforehand:
it, a skip that names the command, or a failure where CI must not skip."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.harness.cached_builds import BuildFailedError

Built = TypeVar("Built")


def prepared(require: Callable[[], Built], *, required_by: str) -> Built:
    """What `require` gives. Where it is not built the test is skipped,
    or fails if the variable `required_by` is 1."""
    try:
        return require()
    except BuildFailedError as error:
        if os.environ.get(required_by) == "1":
            pytest.fail(f"{required_by}=1, and {error}", pytrace=False)
        pytest.skip(str(error))
