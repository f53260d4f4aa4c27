"""The invariants of what is followed at the API server (`epp/sources/kube`)."""

from typing import Any

from epp.sources.kube.policies import PolicySet
from epp.sources.kube.pools import FollowedPool, Pools, united
from epp.sources.kube.reflector import Collection, Reflector


def check_policies(policies: PolicySet) -> None:
    for each in policies.claims.found.values():
        stated = each.content
        assert not stated.ours or (stated.policy is None) == bool(stated.fault), "valid, or with a fault"
        assert stated.last is None or stated.last.metadata.generation <= each.metadata.generation


def check_pools(pools: Pools) -> None:
    for each in pools._pools:
        _check_followed(each)


def _check_followed(followed: FollowedPool) -> None:
    endpoints = united([followed.pods.found])
    assert len({e.name for e in endpoints}) == len(endpoints) == len({e.address for e in endpoints})
    assert (followed.task is None) == (not followed.followed.selector.match_labels)
    assert followed.pool.found or followed.task is None, "pods are followed for a pool that exists"


def check_reflector(reflector: Reflector[Any]) -> None:
    assert reflector.collection.listed or not reflector._version, "a version comes with a list"


def check_collection(collection: Collection[Any, Any]) -> None:
    assert len(collection.found) <= collection.most
