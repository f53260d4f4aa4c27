"""`make run` has only the packages of requirements/run.txt. Nothing that it imports may need the packages
of the tests.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_NAME = re.compile(r"^([A-Za-z0-9._-]+)==", re.MULTILINE)
_CODE = """
import sys

# Importing such a module fails, and a package that only looks whether it is there finds none.
sys.modules.update(dict.fromkeys(sys.argv[1:]))
import bench.demo.__main__
"""


def test_the_demo_starts_without_the_packages_of_the_tests() -> None:
    run, dev = (
        set(_NAME.findall((ROOT / "requirements" / f"{name}.txt").read_text())) for name in ("run", "dev")
    )
    missing = {name.lower().replace("-", "_") for name in dev - run}
    assert "pytest" in missing
    ended = subprocess.run(
        [sys.executable, "-c", _CODE, *missing],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
