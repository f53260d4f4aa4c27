"""Compiles the picker's hot path if `PREFIX_GATEWAY_COMPILE` is set; pyproject.toml holds all other settings.

`PREFIX_GATEWAY_COMPILE=1 pip install --no-build-isolation .` gives mypyc the modules that pyproject.toml
lists under `[tool.prefix-gateway]`. mypyc turns typed Python into C. The installed package then holds each
module twice: Python imports the compiled file, and tracebacks show lines of the `.py` file. Without the
variable the package is plain Python. An editable install is refused, because an old `.so` would hide edits of
the `.py` beside it. The picker's image is built with the variable
(docs/decisions/0008-the-image-is-compiled.md).
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup

_ASKED = os.environ.get("PREFIX_GATEWAY_COMPILE", "") not in {"", "0"}
_MYPY = (
    # `make check` checks the types with the stubs of other packages. This build only reads the types.
    *("--config-file=", "--follow-imports=silent", "--ignore-missing-imports"),
    "--disable-error-code=import-untyped",
)


def _compiled() -> list[Extension]:
    if "editable_wheel" in sys.argv:
        sys.exit(
            "PREFIX_GATEWAY_COMPILE=1 is not for editable installs: the compiled modules would hide your edits"
        )
    try:
        from mypyc.build import mypycify  # noqa: PLC0415 - only this way of building needs it
    except ImportError:
        sys.exit(
            "PREFIX_GATEWAY_COMPILE=1 needs mypyc: pip install --require-hashes -r requirements/compile.txt"
        )
    modules = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["prefix-gateway"]["compiled"]
    files = [f"{name.replace('.', '/')}.py" for name in modules]
    return mypycify([*_MYPY, *files], opt_level="2", debug_level="0", group_name="prefix_gateway")


setup(ext_modules=_compiled() if _ASKED else [])
