"""Defines the `kubernetes` section of the configuration, which `epp.config.settings` reads."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from epp.base.errors import ConfigError
from epp.config.strict import Strict

_NAME: Final = "[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_NAME_OR_NONE: Final = f"^({_NAME})?$"
LlmdGroup = Literal["llm-d.ai", "inference.networking.x-k8s.io"]
"""An API group of llm-d's objects. The newer group is first."""
DnsName = Annotated[str, Meta(min_length=1, max_length=253, pattern=f"^{_NAME}$")]
_LabelKey = Annotated[str, Meta(min_length=1, max_length=317, pattern=r"^[A-Za-z0-9][-A-Za-z0-9_./]*$")]
_LabelValue = Annotated[str, Meta(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]


class Kubernetes(Strict, frozen=True):
    """Read endpoints and policy from a Kubernetes cluster instead of `endpointsFile`."""

    pool: Annotated[str, Meta(max_length=253, pattern=_NAME_OR_NONE)] = ""
    """Name of the InferencePool whose pods are the endpoints. Policies name this pool in `targetRef`. With
    `selector` the pool does not have to exist."""
    pools: Annotated[tuple[DnsName, ...], Meta(max_length=32)] = ()
    """Names of several InferencePools, instead of `pool`. The model in the body of a request decides which of
    their servers may take it (docs/models.md)."""
    service: Annotated[str, Meta(max_length=253, pattern=_NAME_OR_NONE)] = ""
    """Name of this picker's Service, which a policy for all its pools has in `targetRef`."""
    namespace: Annotated[str, Meta(max_length=63)] = ""
    """Namespace of the pool, its pods and policies. Empty means the namespace of the picker."""
    selector: Annotated[dict[_LabelKey, _LabelValue], Meta(max_length=16)] = {}
    """Labels of the pods, for clusters without InferencePools. Empty means the selector of the pool."""
    target_ports: Annotated[tuple[Annotated[int, Meta(ge=1, le=65535)], ...], Meta(max_length=8)] = ()
    """Ports of the pods, together with `selector`. Each port is an endpoint of its own."""
    kubeconfig: str = ""
    """Kubeconfig file to reach the cluster with. Empty means the service account of the pod."""
    objectives: Annotated[tuple[LlmdGroup, ...], Meta(max_length=2)] = ()
    """API groups of the InferenceObjectives that give requests a priority for flow control. The cluster needs
    the CRDs of these groups."""
    rewrites: Annotated[tuple[LlmdGroup, ...], Meta(max_length=2)] = ()
    """API groups of the InferenceModelRewrites that give models other names (docs/models.md). The cluster
    needs the CRDs of these groups."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the pools in order of precedence. A configuration that was checked has at least one."""
        return self.pools or (self.pool,)

    def validate(self) -> None:
        """Check what the types cannot check. The ConfigError names the field at fault."""
        if bool(self.pool) == bool(self.pools):
            raise ConfigError("kubernetes.pool: set either this or kubernetes.pools")
        if len(set(self.pools)) < len(self.pools):
            raise ConfigError("kubernetes.pools: a name is listed twice; remove one of the two")
        if self.selector and self.pools:
            raise ConfigError(
                "kubernetes.selector: works only with kubernetes.pool, because one selector may choose the pods of "
                "several models"
            )
        if bool(self.selector) != bool(self.target_ports):
            raise ConfigError(
                "kubernetes.selector: needs kubernetes.targetPorts; set both, or set neither to follow the "
                "InferencePool"
            )
