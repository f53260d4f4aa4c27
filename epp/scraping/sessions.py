"""HTTP sessions for questions that model servers are asked seldom. Called by `model_lists` and `probes`."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp


def session_for_questions(*, headers: Mapping[str, str], timeout_s: float) -> aiohttp.ClientSession:
    """A session that keeps no connection open, ignores proxies of the environment, and unpacks no answer. So
    an answer of any unpacked size stays bounded.

    timeout_s: for each question with its answer. The connection must be there after half of this time.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=timeout_s / 2),
        trust_env=False,
    )
