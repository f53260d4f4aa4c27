"""What both sides of the wire rely on: recordings of a real vLLM under `data/`,
and the rules read from them."""
