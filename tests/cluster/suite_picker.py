"""The program of the pods that the conformance suite of gateway-api-inference-extension starts as its picker:
our picker, set up by the arguments of theirs.
"""

import json
import os
import tempfile
from argparse import ArgumentParser
from pathlib import Path


def main() -> None:
    arguments = ArgumentParser()
    for name in ("pool-name", "pool-namespace", "grpc-port", "grpc-health-port"):
        arguments.add_argument(f"--{name}", required=True)
    known, _ = arguments.parse_known_args()
    config = {
        "dialect": "istio",
        "conformanceHeaders": True,
        "listen": {
            "address": f"0.0.0.0:{known.grpc_port}",
            "healthAddress": f"0.0.0.0:{known.grpc_health_port}",
        },
        "kubernetes": {"pool": known.pool_name, "namespace": known.pool_namespace},
        "envoy": {"edsFile": "", "failOpen": False},
    }
    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(config))
    os.execvp("epp", ["epp", "serve", "--config", str(path)])


if __name__ == "__main__":
    main()
