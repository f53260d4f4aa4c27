"""Things that must be built before a test: the thing, or a skip that names the command, or a failure where CI
must not skip.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.harness.cached_builds import BuildFailedError

Built = TypeVar("Built")


def prepared(require: Callable[[], Built], *, required_by: str) -> Built:
    """The result of `require`. If it is not built, the test is skipped, or fails if the variable
    `required_by` is 1.
    """
    try:
        return require()
    except BuildFailedError as error:
        if os.environ.get(required_by) == "1":
            pytest.fail(f"{required_by}=1, and {error}", pytrace=False)
        pytest.skip(str(error))
