"""Print the KV events of a vLLM server, one JSON object a line: `kv_event_tap.py ZMQ-ADDRESS`.

Run by `recording` under the Python of the vLLM environment, which has ZeroMQ.
"""

from __future__ import annotations

import json
import sys

import zmq


def main(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(address)
        while True:
            topic, sequence, payload = subscriber.recv_multipart()
            record = {
                "topic": topic.decode(),
                "sequence": int.from_bytes(sequence, "big"),
                "payload_hex": payload.hex(),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
