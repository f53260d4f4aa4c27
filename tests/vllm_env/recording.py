"""Writes tests/contract/data: the messages of a real vLLM, for tests that run without vLLM. All prompts are
fixed. Times, ids and timestamps come from the server, so they differ in a second recording. The recorder
refuses to write anything that names a path of the machine. Called by `python -m tests.environments vllm
record`.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from epp.sources.scraping.metric_names import FAMILIES
from tests.harness.cached_builds import Progress, say
from tests.vllm_env import rendering, request_fields, routes
from tests.vllm_env.environment import VllmEnvironment, require
from tests.vllm_env.prompts import prose
from tests.vllm_env.server import BLOCK_TOKENS, MODEL_NAME, ServerOptions, VllmServer, start_all

DATA_FOLDER = Path(__file__).parents[1] / "contract" / "data"
HASH_SEED = "vllm-none-hash"
"""The seed of vLLM's first block hash if PYTHONHASHSEED is not set."""
EVENT_TIMEOUT_S = 60.0
CLEARED = b"AllBlocksCleared"

Event = Mapping[str, object]


def record_all(*, progress: Progress = say) -> None:
    """Start two servers, send all requests, and replace the files of DATA_FOLDER."""
    environment = require()
    with tempfile.TemporaryDirectory(prefix="vllm-") as name:
        folder = Path(name)
        plain = VllmServer(environment, name="plain", folder=folder, options=_options(folder, "sha256_cbor"))
        # A cache of 64 blocks, so that the second half of its prompts evicts the first.
        small = VllmServer(
            environment,
            name="small",
            folder=folder,
            options=_options(folder, "sha256", cache_blocks=64, prompt_limit_tokens=1024),
        )
        progress("starting two servers")
        start_all([plain, small])
        progress(f"ready after {plain.ready_after_s:.0f} s")
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(small.stop)
            cleanup.callback(plain.stop)
            files = {"metrics.txt": record_page(plain), "routes.json": _as_lines(read_routes(environment))}
            files["request_fields.json"] = json.dumps(read_request_fields(environment), indent=1) + "\n"
            progress("recorded the metrics page, the routes and the fields; recording KV events")
            for server in (plain, small):
                algorithm = server.options.hash_algorithm
                files[f"kv_events_{algorithm}.json"] = _one_item_a_line(record_kv_events(environment, server))
    _refuse_paths(files, private=(environment.folder.parent, Path(name), Path.home()))
    DATA_FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (DATA_FOLDER / file).write_text(text)
        progress(f"wrote {file}, {len(text):,} characters")


def read_routes(environment: VllmEnvironment) -> list[dict[str, str]]:
    """Return every route of vLLM, in all of its modes. This takes a quarter of a minute."""
    found: list[dict[str, str]] = _printed_by(environment, routes.__file__)
    return found


def read_request_fields(environment: VllmEnvironment) -> dict[str, dict[str, Any]]:
    """Return the fields of vLLM's request classes with their defaults, by API."""
    found: dict[str, dict[str, Any]] = _printed_by(environment, request_fields.__file__)
    return found


def render(environment: VllmEnvironment, bodies: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the prompts that vLLM renders from bodies sent to paths. This takes half a minute."""
    found: list[str] = _printed_by(environment, rendering.__file__, given=json.dumps(bodies))
    return found


def _printed_by(environment: VllmEnvironment, program: str, *, given: str = "") -> Any:
    """Run a program in the environment of vLLM, and return the JSON on its last line."""
    done = subprocess.run(
        [environment.python, "-W", "ignore", program],
        input=given,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])


def record_page(server: VllmServer) -> str:
    """Return the metrics page of a server that has served its model and each of its adapters, without the
    families that no reader of ours knows.
    """
    prompt = prose("recorded prompt", words=120)
    for model in (MODEL_NAME, MODEL_NAME, *server.options.adapters):
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        assert server.post("/v1/completions", body).status == 200
    page = server.get("/metrics").body.decode()
    families = re.split(r"^(?=# HELP )", page, flags=re.MULTILINE)
    names = {name.decode() for name in FAMILIES}
    return "".join(one for one in families if one and one.split()[2].removesuffix("_total") in names)


def record_kv_events(environment: VllmEnvironment, server: VllmServer) -> dict[str, object]:
    """Return the event batches of a series of requests, and the tokens of each request."""
    assert server.options.kv_events_socket is not None
    requests: list[dict[str, object]] = []
    with _tap(environment, address=f"ipc://{server.options.kv_events_socket}") as events:
        _wait_for_subscriber(server, events)
        # Empties the cache, so that the recording starts from nothing. vLLM sends the event about the reset,
        # and every other, only with the next request's.
        assert server.post("/reset_prefix_cache", b"").status == 200
        conversation = prose("first turn", words=200)
        requests.append(_ask(server, conversation))
        requests.append(_ask(server, conversation + prose("second turn", words=60)))
        for adapter in server.options.adapters:
            requests.append(_ask(server, conversation, model=adapter))
        requests.append(_ask(server, conversation, cache_salt="tenant-1"))
        for n in range(8):
            requests.append(_ask(server, prose(f"another prompt {n}", words=200)))
        assert server.post("/reset_prefix_cache", b"").status == 200
        requests.append(_ask(server, conversation))
        batches: list[Event] = []
        clears = 0
        while clears < 2:
            batch = events.get(timeout=EVENT_TIMEOUT_S)
            clears += CLEARED in bytes.fromhex(str(batch["payload_hex"]))
            if clears:
                batches.append(batch)
    return {
        "hash_algorithm": server.options.hash_algorithm,
        "hash_seed": HASH_SEED,
        "block_tokens": BLOCK_TOKENS,
        "requests": requests,
        "batches": batches,
    }


def _wait_for_subscriber(server: VllmServer, events: queue.Queue[Event]) -> None:
    """Send requests until an event arrives: a publisher drops what it sends before it knows its
    subscriber.
    """
    for n in range(100):
        _ask(server, prose(f"is anybody listening {n}", words=40))
        with contextlib.suppress(queue.Empty):
            events.get(timeout=1)
            return
    raise TimeoutError(f"no KV event from vLLM {server.name}")


def _ask(
    server: VllmServer, prompt: str, *, model: str = MODEL_NAME, cache_salt: str | None = None
) -> dict[str, object]:
    body: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    choices = answer.json()["choices"]
    assert isinstance(choices, list)
    [choice] = choices
    return {
        "model": model,
        "cache_salt": cache_salt,
        "prompt": prompt,
        "prompt_token_ids": choice["prompt_token_ids"],
        "answer_token_ids": choice["token_ids"],
    }


@contextlib.contextmanager
def _tap(environment: VllmEnvironment, *, address: str) -> Iterator[queue.Queue[Event]]:
    script = Path(__file__).with_name("kv_event_tap.py")
    events: queue.Queue[Event] = queue.Queue()
    command = [str(environment.python), str(script), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def pump() -> None:
            for line in lines:
                events.put(json.loads(line))

        reader = threading.Thread(target=pump, name="kv-event-tap")
        reader.start()
        try:
            yield events
        finally:
            process.kill()
            reader.join()


def _options(
    folder: Path, algorithm: str, *, cache_blocks: int = 2048, prompt_limit_tokens: int = 8192
) -> ServerOptions:
    return ServerOptions(
        cache_blocks=cache_blocks,
        prompt_limit_tokens=prompt_limit_tokens,
        hash_algorithm=algorithm,
        kv_events_socket=folder / f"{algorithm}.sock",
        variables={"VLLM_SERVER_DEV_MODE": "1"},  # for /reset_prefix_cache
    )


def _refuse_paths(files: Mapping[str, str], *, private: tuple[Path, ...]) -> None:
    for file, text in files.items():
        # The events are binary, in hexadecimal.
        for path in private:
            for spelling in (str(path), str(path).encode().hex()):
                if spelling in text:
                    raise ValueError(f"{file} would contain the path {path}")


def _one_item_a_line(value: Mapping[str, object]) -> str:
    """Return JSON whose lists at the first level have an item on each line: a diff is readable, and does not
    spend a line on each token.
    """
    parts = []
    for key, part in value.items():
        text = json.dumps(part)
        if isinstance(part, list):
            text = "[\n" + ",\n".join(json.dumps(item) for item in part) + "\n]"
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _as_lines(items: list[dict[str, str]]) -> str:
    return "[\n" + ",\n".join(map(json.dumps, items)) + "\n]\n"
