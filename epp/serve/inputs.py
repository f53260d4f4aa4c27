"""Reads what a picker is made of: the files of the policy and of the endpoints, at start and again when they
change, the hash secret, and the settings of its parts that follow from the configuration.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from epp.base.errors import ConfigError
from epp.config.policy import DEFAULT_POLICY, Policy, load_policy
from epp.config.reading import read_file, read_secret
from epp.config.settings import Config
from epp.config.sharing import SIGNING_KEY
from epp.observe.telemetry.metrics import Metrics
from epp.observe.tracing import start as tracing
from epp.picker.picker import Picker
from epp.picker.prefix_index.secret import KEY_BYTES, HashSecret, derived
from epp.protocol.http_events import BodyRoom
from epp.protocol.settings import StreamSettings
from epp.request.blocked import BlockedPaths
from epp.sources.files.endpoints_file import Listed, load_endpoints
from epp.sources.files.watch import CertificateWatch, FileWatcher
from epp.sources.kube.api import require
from epp.sources.sharing import service as sharing

if TYPE_CHECKING:
    from epp.sources.kvevents.service import ExactService  # needs ZeroMQ, which is an extra

_log = logging.getLogger("epp")
_NO_ENDPOINTS: Final = b"endpoints: []"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The content of the configured files at start."""

    policy: Policy
    listed: Listed
    """The content of the endpoints file. It is empty if the endpoints come from a cluster."""
    policy_text: bytes | None
    """The text that `policy` was read from. None means that `policy` is the default, because there is no file
    or the file was refused.
    """
    endpoints_text: bytes
    make_exact_service: Callable[[Picker], ExactService] | None
    """Makes exact mode, with the tokenizers and templates that were read. None: it is off."""


def load_inputs(config: Config, *, tolerant: bool = False) -> Inputs:
    """Read the policy and the endpoints, but not the endpoints of a cluster. A ConfigError names the file and
    the field.

    `tolerant`: a policy file that is refused is logged, and the default policy is used instead. A bad policy
    is no reason to serve no requests.
    """
    if config.kubernetes is not None:
        require(config.kubernetes)
    sharing.require(config.sharing)
    make_exact_service: Callable[[Picker], ExactService] | None = None
    if config.exact_mode is not None:
        from epp.sources.kvevents import service as exact  # noqa: PLC0415 - nothing of exact mode is loaded without it

        models = exact.read_models(config.exact_mode)
        make_exact_service = partial(exact.make, settings=config.exact_mode, models=models)
    tracing.require(config.tracing)
    endpoints_text = _NO_ENDPOINTS
    if config.endpoints_file:
        endpoints_text = read_file(config.endpoints_file, field="endpointsFile")
    policy_text = read_file(config.policy_file, field="policyFile") if config.policy_file else None
    policy = DEFAULT_POLICY
    try:
        if policy_text is not None:
            policy = file_policy(policy_text, config)
    except ConfigError as error:
        if not tolerant:
            raise
        _log.error("the default policy is used until this policy file is corrected: %s", error)
        policy_text = None
    return Inputs(
        policy=policy,
        listed=load_endpoints(endpoints_text, source=config.endpoints_file),
        policy_text=policy_text,
        endpoints_text=endpoints_text,
        make_exact_service=make_exact_service,
    )


def file_policy(text: bytes, config: Config) -> Policy:
    """Return the policy in `policyFile`. Raise ConfigError, which says what is wrong with it."""
    policy = load_policy(text, source=config.policy_file)
    if config.kubernetes is not None and policy.spec.mode == "DryRun":
        raise ConfigError(
            f"{config.policy_file}: spec.mode: beside `kubernetes` this policy routes while no policy object "
            "does; set Enforce here, and DryRun in an object"
        )
    return policy


Watcher = FileWatcher[Any] | CertificateWatch


def watchers(
    config: Config,
    inputs: Inputs,
    metrics: Metrics,
    *,
    on_endpoints: Callable[[Listed], None],
    on_policy: Callable[[Policy], None],
) -> list[Watcher]:
    """Return the watchers that follow the configured files from now on."""
    listed = partial(load_endpoints, source=config.endpoints_file)
    policy = partial(file_policy, config=config)
    files: tuple[tuple[str, str, Callable[[bytes], Any], Callable[[Any], None], bytes | None], ...] = (
        ("endpoints", config.endpoints_file, listed, on_endpoints, inputs.endpoints_text),
        ("policy", config.policy_file, policy, on_policy, inputs.policy_text),
    )
    found: list[Watcher] = [
        FileWatcher(Path(path), parse=parse, on_change=use, on_result=counted(metrics, source), applied=text)
        for source, path, parse, use, text in files
        if path
    ]
    if config.listen.tls is not None:
        found.append(CertificateWatch(config.listen.tls, counted(metrics, "certificate")))
    return found


def counted(metrics: Metrics, source: str) -> Callable[[bool], None]:
    """Return what counts the changes of this file. Its first content is in use."""
    counts = metrics.process
    counts.reload_ok[source] = 1

    def on_result(ok: bool) -> None:  # noqa: FBT001 - as the watchers call it
        counts.reloads[source, "accepted" if ok else "refused"] += 1
        counts.reload_ok[source] = ok

    return on_result


# -- what follows from the configuration ---------------------------------------------------------------------

BESIDE_HUB: Final = "hash-secret"
"""Name of the file beside the workers' socket. The process that starts the workers writes one secret there
for all of them.
"""


def stream_settings(config: Config, room: BodyRoom, *, traced: bool) -> StreamSettings:
    return StreamSettings(
        max_body_bytes=config.envoy.max_body_bytes,
        room=room,
        blocked=BlockedPaths(config.closed_paths),
        hold_streams=config.holds_streams,
        caller=config.caller,
        conformance_headers=config.conformance_headers,
        retries_once=config.caller.own_config and config.envoy.num_retries == 1,
        mode_override=config.streams.mode_override,
        longest_delay_s=config.asks_for_s,
        given_delay_s=config.gives_s,
        answers_list=config.models.answer_list,
        traced=traced,
    )


def hash_secret(config: Config, *, hub: Path | None) -> HashSecret:
    """Return the hash secret of this process: from a file, from the pool's signing key, from the process that
    started this one, or a random one. Raises ConfigError if the file cannot be used.
    """
    if config.hash_secret_file:
        return derived(read_secret(config.hash_secret_file, field="hashSecretFile"))
    redis = config.sharing.redis
    if redis is not None and redis.signing_key_file:
        return derived(read_secret(redis.signing_key_file, field=SIGNING_KEY))
    if redis is None and hub is not None and (beside := hub.with_name(BESIDE_HUB)).exists():
        return HashSecret(beside.read_bytes(), made_here=True)
    return HashSecret(secrets.token_bytes(KEY_BYTES), made_here=True)


def write_beside(hub: Path) -> None:
    """Write one secret for all workers that meet at this socket. Only this user may enter the folder."""
    hub.with_name(BESIDE_HUB).write_bytes(secrets.token_bytes(KEY_BYTES))
