"""`helm test`: asks the gateway for its models, and for a completion if MODEL names a model.
Only the standard library.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

URL = os.environ["GATEWAY_URL"]
MODEL = os.environ.get("MODEL", "")
# Less than helm's own five minutes, so that the reason of a failure is printed.
# The test may run while the first pods still fetch their images.
PATIENCE_S = float(os.environ.get("PATIENCE_S", "240"))
# The certificate is not verified, because it has the name that clients outside use.
TRUST = ssl.create_default_context()
TRUST.check_hostname = False
TRUST.verify_mode = ssl.CERT_NONE


def ask(path: str, body: object) -> tuple[int, str]:
    """Return status and text. The status is 0 if nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data=data, headers={"content-type": "application/json"})  # noqa: S310 - the chart's own address
    try:
        with urllib.request.urlopen(request, timeout=30, context=TRUST) as answer:  # noqa: S310 - the same
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def succeeds(what: str, path: str, body: object) -> bool:
    """Try until it works, because pods may have just become ready."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status, text = ask(path, body)
        if status == 200:
            print(f"ok: {what}: {text[:300]}")
            return True
        if time.monotonic() > deadline:
            print(f"FAILED: {what}: {URL}{path} answered {status or 'nothing'}: {text[:500]}")
            return False
        time.sleep(1)


def main() -> int:
    good = succeeds("models", "/v1/models", None)
    if MODEL:
        good &= succeeds(
            "a completion", "/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
