"""The parts in C under sanitizers, with generated input in buffers of exactly its size."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import epp

ROOT = Path(epp.__file__).parent
JSONTEXT, WIRE = ROOT / "request" / "_jsontext.c", ROOT / "protocol" / "_wire.c"
CHAIN = ROOT / "picker" / "prefix_index" / "_chain.c"
SEED = os.environ.get("PREFIX_GATEWAY_SANITIZER_SEED", "1")
MEGABYTES = os.environ.get("PREFIX_GATEWAY_SANITIZER_MEGABYTES", "10")
pytestmark = pytest.mark.processes  # compiles C and runs it
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]


def runtime(name: str) -> str:
    """Return the sanitizer's library if the compiler has its own, and the given name otherwise."""
    found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def run(
    directory: Path, name: str, source: str, *, megabytes: str = MEGABYTES
) -> subprocess.CompletedProcess[str]:
    (directory / name).write_text(source)
    built = (directory / name).with_suffix(".so")
    flags = ["-shared", "-fPIC", "-g", "-O1", "-fno-omit-frame-pointer"]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    headers = [f"-I{sysconfig.get_paths()['include']}", f"-I{ROOT / 'base'}"]
    subprocess.run(
        [COMPILER, *flags, *checks, *headers, str(directory / name), "-o", str(built)],
        check=True,
    )
    environment = os.environ | {
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps its memory until the end
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "tests.harness.sanitized_c", str(built), SEED, megabytes]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize(
    ("path", "megabytes"),
    [(JSONTEXT, MEGABYTES), (WIRE, "2"), (CHAIN, "30")],
    ids=lambda v: Path(v).name,
)
def test_no_input_makes_the_c_code_read_or_write_beyond_its_buffers(
    tmp_path: Path, path: Path, megabytes: str
) -> None:
    ended = run(tmp_path, path.name, path.read_text(), megabytes=megabytes)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert int(ended.stdout.split()[0]) > 10_000


@pytest.mark.parametrize(
    ("path", "bound", "mistake"),
    [
        (JSONTEXT, "for (; end - at >= 16; at += 16)", "for (; end - at >= 15; at += 16)"),
        (JSONTEXT, "while (at < end && (*at == ' '", "while ((*at == ' '"),
        (WIRE, "if (at >= from->end)", "if (at > from->end)"),
        (
            WIRE,
            "if (size > (unsigned long long)(from->end - at))",
            "if (size > (unsigned long long)(from->end - at) + 1)",
        ),
        (WIRE, "(ends ? 2 : 0)", "0"),
        (CHAIN, "later_count > (view.len - count * size) / later_size", "0"),
        (CHAIN, "secret + SECRET - STRIPE - 7", "secret + SECRET - STRIPE + 7"),
    ],
    ids=range(7),
)
def test_a_wrong_bound_is_noticed(tmp_path: Path, path: Path, bound: str, mistake: str) -> None:
    source = path.read_text()
    assert bound in source
    ended = run(tmp_path, path.name, source.replace(bound, mistake))
    assert ended.returncode != 0
    assert "ERROR: AddressSanitizer" in ended.stderr
