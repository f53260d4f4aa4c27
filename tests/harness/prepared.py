"""Things that must be built before a test: the thing, or a skip that names the command, or a failure where CI
must not skip.
"""

import os
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

import pytest

from tests.harness.cached_builds import BuildFailedError

Built = TypeVar("Built")
CLUSTER: Final = "PREFIX_GATEWAY_REQUIRE_CLUSTER"
"""The variable that is set where CI runs everything."""


def prepared(require: Callable[[], Built], *, required_by: str) -> Built:
    """Return the result of `require`. If the thing is not built, skip the test, or fail it if the variable
    `required_by` is 1.
    """
    try:
        return require()
    except BuildFailedError as error:
        lacking(str(error), required_by=required_by)


def lacking(what: str, *, required_by: str) -> NoReturn:
    """Skip the test, or fail it if the variable `required_by` is 1."""
    if os.environ.get(required_by) == "1":
        pytest.fail(f"{required_by}=1, and {what}", pytrace=False)
    pytest.skip(what)
