"""Writes the text that the demo prints after the table: the addresses of everything, with commands that work
when pasted.
"""

from __future__ import annotations

import json
import shlex
from typing import Any, Final

from bench.demo.fleet import Fleet
from bench.demo.workload import MODEL

QUESTION: Final = "What is the capital of France?"


def chat_body(*, stream: bool = False) -> bytes:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 40,
        "temperature": 0,
    }
    if stream:
        body["stream"] = True
    return json.dumps(body).encode()


def curl_line(url: str) -> str:
    """Return a curl command for a chat request that also prints the answer's headers, which contain the
    request id.
    """
    json_type = shlex.quote("content-type: application/json")
    return f"curl -i {url}/v1/chat/completions -H {json_type} -d {shlex.quote(chat_body().decode())}"


def invitation(fleet: Fleet, *, rule: str, request_id: str) -> str:
    """Return the lines that name every address and the next commands."""
    admin = fleet.admin_url
    places = [
        ("gateway", f"{fleet.envoy.url}  (OpenAI API; routes by {rule})"),
        ("live page", f"{admin}/  (servers, hot prefixes, queue, current requests)"),
        ("one decision", f"{admin}/decisions/{request_id or '<x-request-id of an answer>'}"),
        ("metrics", f"{admin}/metrics"),
        (
            "policy",
            f"{fleet.config.policy_file}  (change `rule` there: the picker uses the new rule within a second)",
        ),
        ("Envoy admin", f"{fleet.envoy.admin_url}/"),
        ("model servers", "  ".join(fleet.server_urls)),
    ]
    lines = ["The gateway stays up. Try it:", "", f"  {curl_line(fleet.envoy.url)}", ""]
    lines += [f"  {name:<14} {where}" for name, where in places]
    lines += [
        "",
        "  In another terminal: make load (locust)",
        "  See why prompt tokens were missed, and what other rules would have done (after `. .venv/bin/activate`):",
        f"    epp explain --admin {admin}",
        f"    epp record recording.jsonl --admin {admin}     # while requests come, until Ctrl-C",
        "    epp replay recording.jsonl --rule round-robin --load 1.3",
        "",
        "Ctrl-C ends everything.",
    ]
    return "\n".join(lines)
