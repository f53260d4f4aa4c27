"""Checks whether a configuration can run on this machine: certificates can be used, and folders can be
written. Finds settings that contradict each other, too.

The checks leave nothing behind. `epp serve` needs none: it fails where a file of its own is missing. Envoy's
certificates may lie on another machine, so `epp check` prints a remark and no error if they are not found.
"""

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from epp.base.errors import ConfigError, usable
from epp.config.dialects import WAIT_SHARE
from epp.config.policy import Policy
from epp.config.reading import paths_of
from epp.config.settings import Config
from epp.serve.inputs import hash_secret
from epp.sources.files.watch import check_tls
from epp.sources.scraping.page_client import ApiKey

_LONGEST_SOCKET_BYTES: Final = 107
"""The longest path that Linux allows for a unix socket."""


def inspect(config: Config) -> list[str]:
    """Return remarks for a person. A ConfigError names the field, says what is wrong with it, and what to
    do.
    """
    if config.listen.tls is not None:
        check_tls(config.listen.tls, field="listen.tls", unix_now_s=time.time())
    for address in config.listen.addresses(workers=config.workers):
        if address.startswith("unix:"):
            _check_socket(Path(address.removeprefix("unix:")), field="listen.address")
    if config.envoy.eds_file:
        above = Path(config.envoy.eds_file).parents
        folder = next(each for each in above if os.access(each, os.F_OK))  # the picker makes the missing ones
        check_folder(folder, field="envoy.edsFile")
    if fault := ApiKey(config.models.api_key_file).fault():
        raise ConfigError(f"models.apiKeyFile: {fault}")
    if config.hash_secret_file:
        hash_secret(config, hub=None)
    return [*_of_dialect(config), *_of_certificates(config)]


def contradictions(config: Config, policy: Policy) -> Iterator[str]:
    """Yield a remark for each field with its former name, for each number of the rule that lets one endpoint
    get nearly all requests of a popular beginning, and one if the gateway waits for a shorter time than the
    policy lets requests wait.
    """
    spec = policy.spec
    yield from spec.failures.former_names()
    for rule, field, number, most in (
        ("prefix-hash", "prefixHash.maxLoadRatio", spec.prefix_hash.max_load_ratio, 2),
        ("prefix-hash", "prefixHash.minInFlight", spec.prefix_hash.min_in_flight, 64),
        ("least-cost", "cost.uncachedTokenWeight", spec.cost.uncached_token_weight, 10),
    ):
        if rule == spec.rule and number > most:
            yield f"{field}: {number:g} lets one endpoint get nearly all requests of a popular beginning; write at most {most}"
    flow, caller, name = spec.flow, config.caller, named(config)
    ttl_s = max(flow.ttl_seconds, *flow.ttl_by_priority.values(), 0.0) if flow.mode == "Hold" else 0.0
    longest_s = max(ttl_s, flow.wait_for_server_seconds)
    if not longest_s or caller.timeouts == "none":
        return
    wait = "flow.ttlSeconds" if longest_s == ttl_s else "flow.waitForServerSeconds"
    if caller.body_only:
        yield f"{wait}: {name} does not wait for the body of a request, so no request waits"
        return
    bound_s = WAIT_SHARE * (config.asks_for_s or config.gives_s)
    fixed = caller.timeouts == "fixed" and not config.asks_for_s
    field = "messageTimeoutSeconds" if fixed else "maxMessageTimeoutSeconds"
    if not bound_s:
        yield (
            f"{wait}: {name} is not known to wait, so no request with a buffered body waits; set "
            f"envoy.{field} to the max_message_timeout of its ext_proc filter"
        )
    elif longest_s > bound_s:
        yield (
            f"{wait}: requests may wait for {longest_s:g} s, but with {name} a request with a buffered "
            f"body is refused after {bound_s:g} s, nine tenths of envoy.{field}; raise this, or lower "
            f"{wait}{' and flow.ttlByPriority' if flow.ttl_by_priority else ''}"
        )


def _of_dialect(config: Config) -> Iterator[str]:
    """Yield remarks on settings that have no effect with this gateway."""
    caller = config.caller
    if config.workers > 1 and caller.by_pool and config.dialect != "auto":
        yield f"workers: an InferencePool names one port, so {config.dialect} calls only the first worker"
    if caller.body_only and config.closed_paths:
        yield (
            f"blockedPaths: {config.dialect} does not show the picker the path of a request, so the picker "
            "refuses no path; list the paths that clients may use in the gateway's routes"
        )


def named(config: Config) -> str:
    if config.dialect != "auto":
        return config.dialect
    return "envoy" if config.caller.own_config else "an unknown gateway (dialect: auto)"


def _of_certificates(config: Config) -> list[str]:
    """Check Envoy's own certificates if this machine has them."""
    if (tls := config.envoy.tls) is None:
        return []
    missing = [
        f"{field}: {path}: this user finds no such file here; Envoy needs the file on the machine where "
        "Envoy runs"
        for field, path in paths_of(tls, under="envoy.tls")
        if not os.access(path, os.F_OK)
    ]
    if not missing:
        check_tls(tls, field="envoy.tls", unix_now_s=time.time())
    return missing


def _check_socket(path: Path, *, field: str) -> None:
    if len(str(path).encode()) > _LONGEST_SOCKET_BYTES:
        raise ConfigError(
            f"{field}: {path}: the path of a unix socket has at most {_LONGEST_SOCKET_BYTES} bytes; choose a "
            "shorter path"
        )
    check_folder(path.parent, field=field)
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(
            f"{field}: {path}: this file exists and is not a socket; remove it, or choose another path"
        )


def check_folder(folder: Path, *, field: str) -> None:
    """Try to write a file in this folder, to find missing permissions, read-only mounts and full disks."""
    with usable(f"{field}: cannot write in {folder}"), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
