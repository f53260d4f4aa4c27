"""The image of the load generator has all that it needs. It needs no file and no package of the picker."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "deploy/docker/load.Dockerfile"


def copied(to: Path) -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE.read_text(), re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            place = to / target / Path(source).name if target.endswith("/") else to / target
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)


def test_the_images_files_run_and_import_nothing_else_of_this_repository(tmp_path: Path) -> None:
    copied(tmp_path)
    code = (
        "import sys, bench.load.__main__, tests.harness.ports, bench.load.locustfile;"
        "print(*sorted({name.split('.')[0] for name in sys.modules}));"
        "print(*sorted(m for m in sys.modules if m.startswith(('bench.', 'tests.'))))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    packages, ours = (set(line.split()) for line in ended.stdout.splitlines())
    assert not packages & {"epp", "model_server", "aiohttp", "grpc"}
    assert {"bench.load.locust_run", "bench.demo.address"} <= ours
    locked = (tmp_path / "requirements/load.txt").read_text()
    dev = (ROOT / "requirements/dev.txt").read_text()
    for pin in re.findall(r"^\S+==\S+", locked, re.MULTILINE):
        assert pin in dev, f"{pin} is not what the tests run with: make lock"
    assert {"locust", "msgspec", "pyyaml"} <= set(re.findall(r"^(\S+)==", locked, re.MULTILINE))
