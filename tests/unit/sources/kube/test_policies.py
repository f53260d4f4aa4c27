"""Which policy routes, and the status of the others."""

from collections.abc import Sequence

import pytest

from epp.config.policy import DEFAULT_POLICY
from epp.sources.kube.objects import PolicyObject
from epp.sources.kube.policies import PolicySet, ResolvedPolicies
from tests.invariants.kube import check_policies
from tests.unit.sources.kube.objects import policy

OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


class JudgedPolicies:
    """A set of policies. The test asks for the outcome after each change."""

    def __init__(self, *objects: PolicyObject, pools: Sequence[str] = ("vllm",)) -> None:
        self.pools = pools
        self.set = PolicySet(pools=pools, service="picker")
        self.set.claims.replace(objects)
        self.outcome = self.judge()

    def judge(self, *, existing: Sequence[str] | None = None) -> ResolvedPolicies:
        existing = self.pools if existing is None else existing
        self.outcome = self.set.resolve(default=DEFAULT_POLICY, existing=existing)
        check_policies(self.set)
        return self.outcome

    def put(self, found: PolicyObject) -> ResolvedPolicies:
        self.set.claims.put(found)
        return self.judge()

    def remove(self, found: PolicyObject) -> ResolvedPolicies:
        self.set.claims.remove(found.metadata.name)
        return self.judge()

    @property
    def acting(self) -> tuple[str, int, str]:
        acting = self.outcome.acting
        return acting.metadata.name, acting.metadata.generation, acting.spec.rule

    def conditions(self, name: str) -> str:
        return ", ".join(f"{one.status} {one.reason}" for one in self.outcome.statuses[name].conditions)

    def messages(self, name: str) -> tuple[str, str]:
        """Return why the policy is accepted or not, and whether it routes."""
        accepted, programmed = self.outcome.statuses[name].conditions
        return accepted.message, programmed.message


def test_a_policy_whose_target_changes_to_another_pool_is_removed() -> None:
    policies = JudgedPolicies(policy("p", rule="affinity"))
    policies.put(policy("p", rule="affinity", target="another", generation=2))
    assert policies.outcome.acting == DEFAULT_POLICY


def test_oldest_of_several_policies_routes_and_the_others_report_conflict() -> None:
    policies = JudgedPolicies(
        policy("new", created=NEW, rule="random"), policy("old", created=OLD, rule="affinity")
    )
    assert policies.acting == ("old", 1, "affinity")
    assert policies.conditions("new") == "False Conflicted, False Conflicted"
    assert "older policy old" in policies.messages("new")[0]


def test_among_policies_of_the_same_second_the_first_name_counts_as_oldest() -> None:
    assert JudgedPolicies(policy("b"), policy("a")).acting[0] == "a"


def test_the_next_oldest_policy_follows_a_deleted_one() -> None:
    policies = JudgedPolicies(policy("old", created=OLD), policy("new", created=NEW, rule="random"))
    policies.remove(policy("old", created=OLD))
    assert policies.acting == ("new", 1, "random")
    assert policies.conditions("new") == "True Accepted, True Programmed"


def test_a_refused_change_leaves_the_last_accepted_spec_in_force() -> None:
    policies = JudgedPolicies(policy("p", rule="affinity", generation=1), policy("younger", created=NEW))
    policies.put(policy("p", rule="affinity", generation=2, sessionHeader="host"))
    assert policies.acting == ("p", 1, "affinity")
    assert policies.conditions("p") == "False Invalid, False Invalid"
    accepted, programmed = policies.messages("p")
    assert "spec: " in accepted
    assert "sessionHeader" in accepted
    assert programmed == "generation 1 of this policy routes"
    assert policies.conditions("younger") == "False Conflicted, False Conflicted", (
        "the refused policy keeps its place"
    )


def test_a_change_that_corrects_a_refused_policy_is_in_force() -> None:
    policies = JudgedPolicies(policy("p", generation=1))
    policies.put(policy("p", generation=2, sessionHeader="host"))
    policies.put(policy("p", generation=3, rule="random"))
    assert policies.acting == ("p", 3, "random")


def test_a_policy_that_was_refused_from_the_start_does_not_block_others() -> None:
    policies = JudgedPolicies(policy("bad", created=OLD, sessionHeader="host"), policy("good", created=NEW))
    assert policies.acting[0] == "good"
    assert policies.conditions("bad") == "False Invalid, False Invalid"
    assert policies.messages("bad")[1] == "policy good routes"


@pytest.mark.parametrize(
    ("generation", "pool", "rule"), [(1, "vllm", "fastest"), (9, "vllm", "affinity"), (1, "a", "affinity")]
)
def test_a_last_accepted_spec_is_not_used_if_invalid_later_or_anothers(
    generation: int, pool: str, rule: str
) -> None:
    accepted = {"targetRef": {"name": pool}, "rule": rule}
    status = {"lastAccepted": {"generation": generation, "spec": accepted}}
    found = JudgedPolicies(policy("p", generation=2, mode="DryRun", status=status))
    assert found.outcome.acting == DEFAULT_POLICY


def test_a_new_policy_with_an_old_name_does_not_inherit_its_spec() -> None:
    policies = JudgedPolicies(policy("p", rule="affinity", uid="1"))
    policies.put(policy("p", uid="2", mode="DryRun"))
    assert policies.outcome.acting == DEFAULT_POLICY


def test_a_policy_in_dry_run_is_scored_while_the_default_routes() -> None:
    policies = JudgedPolicies(policy("p", rule="affinity", mode="DryRun"))
    assert policies.outcome.acting == DEFAULT_POLICY
    assert policies.outcome.tried is not None
    assert policies.outcome.tried.spec.rule == "affinity"
    assert policies.conditions("p") == "True Accepted, False DryRun"
    assert policies.messages("p")[1] == "each pick is scored by this policy too; policy default routes"


def test_a_policy_that_goes_into_dry_run_routes_by_its_last_accepted_spec() -> None:
    policies = JudgedPolicies(policy("p", rule="affinity"))
    policies.put(policy("p", rule="random", mode="DryRun", generation=2))
    assert policies.acting == ("p", 1, "affinity")
    assert policies.outcome.tried is not None
    assert (policies.outcome.tried.metadata.generation, policies.outcome.tried.spec.rule) == (2, "random")
    assert (
        policies.messages("p")[1]
        == "each pick is scored by this policy too; generation 1 of this policy routes"
    )
    policies.put(policy("p", rule="random", generation=3))
    assert policies.acting == ("p", 3, "random")
    assert policies.outcome.tried is None


def test_one_policy_can_be_in_dry_run_while_another_routes() -> None:
    policies = JudgedPolicies(
        policy("acts", created=NEW), policy("tried", created=OLD, mode="DryRun", rule="random")
    )
    assert policies.acting[0] == "acts"
    assert policies.outcome.tried is not None
    assert policies.outcome.tried.metadata.name == "tried"
    assert policies.conditions("acts") == "True Accepted, True Programmed"


def test_the_oldest_of_several_policies_in_dry_run_is_scored() -> None:
    policies = JudgedPolicies(
        policy("old", created=OLD, mode="DryRun"), policy("new", created=NEW, mode="DryRun", rule="random")
    )
    assert policies.outcome.tried is not None
    assert policies.outcome.tried.metadata.name == "old"
    assert policies.conditions("new") == "False Conflicted, False Conflicted"


def test_the_status_of_a_dry_run_says_that_its_chunks_are_not_tried() -> None:
    policies = JudgedPolicies(policy("p", mode="DryRun", chunks={"sizeBytes": 128}))
    assert "its chunks are not tried" in policies.messages("p")[1]


def test_without_the_pool_a_policy_has_no_target() -> None:
    policies = JudgedPolicies(policy("p"))
    policies.judge(existing=[])
    assert policies.conditions("p") == "False TargetNotFound, False TargetNotFound"


SEVERAL = ("a", "b")
"""The pools of a picker whose Service is `picker`."""


def test_a_policy_of_one_of_several_pools_is_refused_with_what_to_write() -> None:
    policies = JudgedPolicies(policy("p", target="a", rule="affinity"), pools=SEVERAL)
    assert policies.outcome.acting == DEFAULT_POLICY
    assert policies.conditions("p") == "False Invalid, False Invalid"
    assert policies.messages("p")[0] == (
        "spec.targetRef: one policy routes for all pools of this picker (a, b), so it targets the picker; write "
        "{kind: Service, name: picker}, or give this pool a picker of its own"
    )


def test_the_policy_of_a_picker_routes_for_all_its_pools() -> None:
    for pools in (SEVERAL, ("a",)):
        policies = JudgedPolicies(
            policy("p", target="picker", kind="Service", rule="affinity"),
            policy("q", target="another", kind="Service"),
            policy("r", target="picker", rule="random", created=OLD),
            pools=pools,
        )
        assert policies.acting == ("p", 1, "affinity")
        assert policies.conditions("p") == "True Accepted, True Programmed"
        assert [*policies.outcome.statuses] == ["p"], "the others are for another Service, and another pool"


def test_a_refused_policy_of_one_pool_routes_on_until_the_picker_has_one() -> None:
    spec = {"targetRef": {"name": "a"}, "rule": "affinity"}
    status = {"lastAccepted": {"generation": 1, "spec": spec}}
    stored = policy("p", target="a", rule="affinity", created=OLD, status=status)
    policies = JudgedPolicies(stored, pools=SEVERAL)
    assert policies.acting == ("p", 1, "affinity")
    assert policies.conditions("p") == "False Invalid, False Invalid"
    policies.put(policy("q", target="picker", kind="Service", rule="random", created=NEW))
    assert policies.acting == ("q", 1, "random")
    assert policies.conditions("q") == "True Accepted, True Programmed"
