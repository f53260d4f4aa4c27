"""Follows how-to pages to the letter: writes their files and runs their commands in a shell. The shell has a
network of its own, in which the addresses and names of the pages are those of model servers.
"""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.harness.certificate import write_tls
from tests.harness.processes import managed_process
from tests.unit.docs.pages import PAGES

pytestmark = pytest.mark.envoy

BLOCKS: Final = {Path(page.name).stem: page.blocks for page in PAGES}
NETWORK: Final = """
set -m
ip link set lo up; ip addr add 10.0.0.1/32 dev lo; ip addr add fd00::2/128 dev lo
printf '127.0.0.1 localhost gateway.example\n10.0.0.1 vllm-b\n' > hosts; mount --bind hosts /etc/hosts
model-server serve --model llama-8b --host 10.0.0.1 --port 8000 &
model-server serve --model llama-8b --host fd00::2 --port 8000 &
works() { for n in $(seq 300); do "$@" > /dev/null 2>&1 && return; sleep 0.2; done; "$@"; }
ended() { kill -INT $1; wait $1; }
works curl -sf http://10.0.0.1:8000/health; works curl -sf 'http://[fd00::2]:8000/health'
"""


def commands(page: str, number: int = 0) -> str:
    """Return a block of commands of the page, as it stands there."""
    return [text for language, text in BLOCKS[page] if language == ""][number].rstrip()


async def follow(script: str, folder: Path, *pages: str) -> str:
    """Write the files that the pages show, and run the script. Return what it printed."""
    for language, text in (block for page in pages for block in BLOCKS[page]):
        if language == "yaml" and (name := re.match(r"# ([a-z]+\.yaml)\b", text)):
            (folder / name[1]).write_text(text)
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder)}
    # CI may run in the background of a shell, which ignores SIGINT there.
    own = ["env", "--default-signal", "unshare", "-rnm", "--pid", "--fork", "--kill-child"]
    shell = [*own, "bash", "-eu", "-c", NETWORK + script]
    async with managed_process("reader", shell, directory=folder, env=variables, cwd=folder) as process:
        assert await process.wait(timeout_s=240) == 0, process.tail(lines=200)
        return process.tail(lines=10_000)


async def test_start_hit_rate_replay_and_lora_work_as_they_are_written(tmp_path: Path) -> None:
    up, run, request = (commands("start", number) for number in range(3))
    recorded, again = commands("replay").partition("#")[0], commands("replay", 1)
    lora = commands("lora").replace("/config/", "").replace("127.0.0.1", "10.0.0.1")
    output = await follow(
        f"""
        {up} & up=$!
        works {request}; ended $up
        {run} & envoy=$!
        works {request}; works curl -sf http://127.0.0.1:9090/
        more() {{ {request}; [ $(wc -l < recording.jsonl) -ge 5 ]; }}  # two lines open a recording
        {recorded} & record=$!; works more; {request}
        ended $record; for name in monday tuesday; do cp recording.jsonl $name.jsonl; done
        cp policy.yaml new.yaml
        {again}
        {commands("hit-rate")}
        {lora} & lora=$!
        works curl -sf http://127.0.0.1:8081/status; curl http://127.0.0.1:8081/status; ended $lora; ended $envoy
        """,
        tmp_path,
        "start",
        "lora",
    )
    for words in ("OK: 2 endpoints", "chat.completion", "token hit rate", '"legal"'):
        assert words in output, output
    assert re.search(r"\b([3-9]|\d\d+) requests of .* prompt tokens", output), output


async def test_tls_works_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    made = write_tls(tmp_path / "tls", mutual=True)
    shutil.copy(made.cert_file, tmp_path / "tls" / "clients-ca.crt")
    for source, name in (
        (made.cert_file, "ca.crt"),
        (made.cert_file, "client.crt"),
        (made.key_file, "client.key"),
    ):
        shutil.copy(source, tmp_path / name)
    before, _, request = commands("tls").replace("gateway.example", "localhost").rpartition("\n")
    serve = "epp serve --config config.yaml & works test -e eds.json"
    output = await follow(f"{serve}\n{before} &\nworks {request}\n{request}", tmp_path, "start", "tls")
    assert '"id":"llama-8b"' in output, output
