"""Defines the base of every section of the configuration and of the policy."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Ratio = Annotated[float, Meta(ge=0, le=1)]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A frozen struct with fields in camelCase. An unknown field is refused. The text below a field describes
    it.
    """
