"""vLLM's preStop hook: waits until vLLM has finished its requests, before vLLM gets SIGTERM. The script needs
only the standard library.

    drain.py PORT AT-LEAST-SECONDS AT-MOST-SECONDS

For AT-LEAST-SECONDS gateways that do not know yet that the pod terminates still send requests. Then the hook
waits until the server says twice in a row that no request runs or waits, for AT-MOST-SECONDS in all. A server
that is too busy to say counts as running. A worker of a server that spans several nodes waits for its leader
in the same way: DRAIN_HOST is the leader's address.
"""

import http.client
import math
import os
import re
import socket
import sys
import time
import urllib.error
import urllib.request

LOAD = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def unfinished(host: str, port: int) -> float | None:
    """Return the requests that run or wait; infinity if the server does not say;
    None if nothing listens any more, or its name is gone.
    """
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as answer:
            return sum(float(value) for value in LOAD.findall(answer.read().decode()))
    except urllib.error.URLError as error:
        return None if isinstance(error.reason, (ConnectionRefusedError, socket.gaierror)) else math.inf
    except (OSError, http.client.HTTPException):
        return math.inf


def main(port: int, at_least_s: int, at_most_s: int) -> None:
    host = os.environ.get("DRAIN_HOST", "127.0.0.1")
    started = time.monotonic()
    time.sleep(at_least_s)
    quiet = 0
    while time.monotonic() - started < at_most_s and quiet < 2:
        left = unfinished(host, port)
        if left is None:
            return
        quiet = quiet + 1 if left == 0 else 0
        time.sleep(0.5)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
