"""vLLM's routes as recorded, which of them are for operators, and where its router sends a request."""

import json
import re
from urllib.parse import unquote

from tests.contract.recordings import read_text

FOR_CLIENTS = {
    "/classify", "/detokenize", "/generative_scoring", "/health", "/inference/v1/generate",
    "/invocations", "/ping", "/pooling", "/rerank", "/score", "/tokenize",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/chat/completions", "/v1/chat/completions/batch",
    "/v1/chat/completions/derender", "/v1/chat/completions/render", "/v1/completions", "/v1/completions/derender",
    "/v1/completions/render", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render",
    "/v1/models", "/v1/realtime", "/v1/rerank", "/v1/responses", "/v1/responses/render", "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel", "/v1/score", "/v1/systemone", "/v2/embed", "/v2/rerank",
}  # fmt: skip
"""Every other route of vLLM is for its operators, or describes the server.
A new one has to be put here or into `BLOCKED_PATHS`."""

ROUTES: list[dict[str, str]] = json.loads(read_text("routes.json"))
OPERATORS = [route for route in ROUTES if route["path"] not in FOR_CLIENTS]
SAMPLES = sorted({re.sub(r"\{.*?\}", "some-name", route["path"]) for route in OPERATORS})
PATTERNS = [re.compile(route["pattern"]) for route in OPERATORS]


def reaches_operators(target: str) -> bool:
    """Tell whether a request for `target` would reach a route for operators in vLLM.
    vLLM's HTTP server removes the query and decodes once; its router tries the regular expression of each
    route.
    """
    path = unquote(re.sub(r"^http://[^/]*", "", target).partition("?")[0].partition("#")[0])
    return any(pattern.match(path) for pattern in PATTERNS)
