"""Reads the files that the configuration names, the policy and the endpoints, at start and again when they
change.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from epp.base.errors import ConfigError
from epp.config.policy import DEFAULT_POLICY, Policy, load_policy
from epp.config.reading import read_file
from epp.config.sections import Tls
from epp.config.settings import Config
from epp.observe.telemetry.metrics import Metrics
from epp.observe.tracing import start as tracing
from epp.request.rewriting import Rewrites
from epp.sources.files.endpoints_file import Listed, load_endpoints
from epp.sources.files.watch import CertificateWatch, FileWatcher
from epp.sources.kube.api import require
from epp.sources.sharing import service as sharing

_log = logging.getLogger("epp")


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


def load_inputs(config: Config, *, tolerant: bool = False) -> Inputs:
    """Read the policy and the endpoints, but not the endpoints of a cluster. A ConfigError names the file and
    the field.

    `tolerant`: a policy file that is refused is logged, and the default policy is used instead. A bad policy
    is no reason to serve no requests.
    """
    if config.kubernetes is not None:
        require(config.kubernetes)
    sharing.require(config.sharing)
    if config.exact_mode is not None:
        from epp.sources.kvevents import service as exact  # noqa: PLC0415 - nothing of exact mode is loaded without it

        exact.read_models(config.exact_mode)
    tracing.require(config.tracing)
    endpoints_text = read_file(config.endpoints_file, field="endpointsFile") if config.endpoints_file else b""
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
        listed=load_endpoints(endpoints_text, source=config.endpoints_file)
        if config.endpoints_file
        else Listed((), Rewrites(())),
        policy_text=policy_text,
        endpoints_text=endpoints_text,
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


def watchers(
    config: Config,
    inputs: Inputs,
    metrics: Metrics,
    *,
    on_endpoints: Callable[[Listed], None],
    on_policy: Callable[[Policy], None],
) -> Iterator[FileWatcher[Any]]:
    """Return the watchers that follow the configured files from now on."""
    if config.endpoints_file:
        yield FileWatcher(
            Path(config.endpoints_file),
            parse=partial(load_endpoints, source=config.endpoints_file),
            on_change=on_endpoints,
            on_result=_counted(metrics, "endpoints"),
            applied=inputs.endpoints_text,
        )
    if config.policy_file:
        yield FileWatcher(
            Path(config.policy_file),
            parse=partial(file_policy, config=config),
            on_change=on_policy,
            on_result=_counted(metrics, "policy"),
            applied=inputs.policy_text,
        )


def certificate_watch(tls: Tls, metrics: Metrics) -> CertificateWatch:
    return CertificateWatch(tls, field="listen.tls", on_result=_counted(metrics, "certificate"))


def _counted(metrics: Metrics, source: str) -> Callable[[bool], None]:
    """Return what counts the changes of this file. Its first content is in use."""
    counts = metrics.process
    counts.reload_ok[source] = 1

    def on_result(ok: bool) -> None:  # noqa: FBT001 - as the watchers call it
        counts.reloads[source, "accepted" if ok else "refused"] += 1
        counts.reload_ok[source] = ok

    return on_result
