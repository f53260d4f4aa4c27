"""Defines Kubernetes objects as the API server writes them, with only the fields that are used.

Bytes are decoded directly into these structs. No Python objects are made for the other fields, which are most
of a pod. The text below a field of `PolicyStatus` is its description in the CRD.
"""

from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, field

from epp.config.policy import API_VERSION

PLURAL: Final = "prefixroutingpolicies"
PATH: Final = f"/apis/{API_VERSION}/namespaces/{{namespace}}/{PLURAL}"
"""Where the API server has the policies."""


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    """Unknown fields are ignored, and missing fields have defaults."""


def _schema(**words: Any) -> Meta:
    """Return what the CRD says of a field. An object is read all the same if it differs, since another
    release may have written it.
    """
    return Meta(extra_json_schema=words)


class PodAnnotations(_Object, frozen=True):
    """Facts about a pod that do not fit into labels."""

    model: str = field(name="prefix-gateway.dev/model", default="")
    """The base model that the pod serves."""
    adapters: str = field(name="prefix-gateway.dev/adapters", default="")
    """LoRA adapters on the pod, separated by commas."""
    metrics: str = field(name="prefix-gateway.dev/metrics", default="")
    """The place of the pod's metrics page, as `[:port][/path]`."""
    data_parallel_port: str = field(name="prefix-gateway.dev/data-parallel-port", default="")
    """The port of the pod's front: each target port is a data parallel rank behind it."""


class PodLabels(_Object, frozen=True):
    """The labels that say which role a pod has."""

    role: str = field(name="llm-d.ai/role", default="")
    """Prefill, decode or both, in llm-d's words."""


class ObjectMeta(_Object, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""


class KubeObject(_Object, frozen=True):
    """What every object has. A watch continues from `metadata.resource_version`."""

    metadata: ObjectMeta
    free_form: ClassVar[bool] = False
    """Whether objects may hold values of any shape. Each object is then checked for its cost before it is
    decoded."""


class PodMetadata(ObjectMeta, frozen=True):
    deletion_timestamp: str | None = None
    annotations: PodAnnotations = PodAnnotations()
    labels: PodLabels = PodLabels()


class ContainerPort(_Object, frozen=True):
    container_port: int = 0


class Container(_Object, frozen=True):
    name: str
    ports: tuple[ContainerPort, ...] = ()


class ReadinessGate(_Object, frozen=True):
    condition_type: str = ""


class PodSpec(_Object, frozen=True):
    containers: tuple[Container, ...] = ()
    readiness_gates: tuple[ReadinessGate, ...] = ()


class PodCondition(_Object, frozen=True):
    type: str
    status: str = "Unknown"


class ContainerStatus(_Object, frozen=True):
    name: str
    restart_count: int = 0
    container_id: str = field(name="containerID", default="")
    started: bool | None = None
    """Whether its startup probe has passed."""
    state: dict[str, Any] = {}


class PodStatus(_Object, frozen=True):
    pod_ip: str = field(name="podIP", default="")
    conditions: tuple[PodCondition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(KubeObject, frozen=True):
    metadata: PodMetadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class PoolSelector(_Object, frozen=True):
    match_labels: dict[str, str] = {}


class PoolPort(_Object, frozen=True):
    number: int


class PoolSpec(_Object, frozen=True):
    selector: PoolSelector = PoolSelector()
    target_ports: tuple[PoolPort, ...] = ()


class Pool(KubeObject, frozen=True):
    """An InferencePool, v1."""

    spec: PoolSpec = PoolSpec()


class PoolRef(_Object, frozen=True):
    name: str = ""


class ObjectiveSpec(_Object, frozen=True):
    priority: int | None = None
    pool_ref: PoolRef = PoolRef()


class Condition(_Object, frozen=True):
    """One aspect of the policy's state, in the form that all of Kubernetes uses."""

    type: Annotated[str, _schema(maxLength=64)]
    """Accepted or Programmed."""
    status: Annotated[str, _schema(enum=["True", "False", "Unknown"])]
    """Whether the condition holds."""
    reason: Annotated[str, _schema(maxLength=64, pattern="^[A-Za-z]+$")] = ""
    """Reason of the status, in one word."""
    message: Annotated[str, _schema(maxLength=1024)] = ""
    """The reason, in a sentence that says what to do."""
    observed_generation: Annotated[int, _schema(minimum=0)] = 0
    """Generation of the spec that was judged."""
    last_transition_time: Annotated[str, _schema(format="date-time")] = ""
    """When `status` last changed."""


class ModelName(_Object, frozen=True):
    value: str = ""


class ModelMatch(_Object, frozen=True):
    model: ModelName = ModelName()


class TargetModel(_Object, frozen=True):
    model_rewrite: str = ""
    weight: int | None = None


class RewriteRule(_Object, frozen=True):
    matches: tuple[ModelMatch, ...] = ()
    targets: tuple[TargetModel, ...] = ()


class RewriteSpec(_Object, frozen=True):
    pool_ref: PoolRef = PoolRef()
    rules: tuple[RewriteRule, ...] = ()


class ClaimStatus(_Object, frozen=True):
    conditions: tuple[Condition, ...] = ()


class ModelRewrite(KubeObject, frozen=True):
    """An InferenceModelRewrite, v1alpha2."""

    spec: RewriteSpec = RewriteSpec()
    status: ClaimStatus = ClaimStatus()


class Objective(KubeObject, frozen=True):
    """An InferenceObjective, v1alpha2."""

    spec: ObjectiveSpec = ObjectiveSpec()
    status: ClaimStatus = ClaimStatus()


class LastAccepted(_Object, frozen=True):
    """The last spec of this policy that routed. It stays in use while a newer one is refused or only tried,
    also after restarts of the picker.
    """

    generation: Annotated[int, _schema(minimum=0)] = 0
    """Generation of that spec."""
    spec: Annotated[Any, _schema(type="object", **{"x-kubernetes-preserve-unknown-fields": True})] = None
    """The fields that were set in that spec."""


class PolicyStatus(_Object, frozen=True, omit_defaults=True):
    """Written by the pickers of the pool; never by people."""

    observed_generation: Annotated[int, _schema(minimum=0)] = 0
    """Generation of the spec that this status describes."""
    conditions: Annotated[
        tuple[Condition, ...],
        _schema(maxItems=8, **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = ()
    """Conditions of the policy. Accepted: the policy is valid, and no older policy is used instead.
    Programmed: this policy routes requests.
    """
    rule: Annotated[str | None, _schema(maxLength=64)] = None
    """The rule of the spec that was judged, its default included."""
    mode: Annotated[str | None, _schema(maxLength=64)] = None
    """The mode of the spec that was judged, its default included."""
    last_accepted: LastAccepted | None = None


class PolicyObject(KubeObject, frozen=True):
    """A PrefixRoutingPolicy. Its spec is checked later, by the code that checks a policy file."""

    free_form: ClassVar[bool] = True
    spec: Any = None
    status: PolicyStatus = PolicyStatus()


class Failure(_Object, frozen=True):
    """A Status object that reports an error."""

    code: int = 0
    message: str = ""
