"""The lines of a watch, cut anywhere by the network, and configurations without access to a cluster."""

import importlib.util
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from epp.base.errors import ConfigError
from epp.config.sections import Kubernetes
from epp.sources.kube.api import Api, ApiError, lines_of, namespace_of, require

MIB = 2**20


async def arriving(pieces: Iterable[bytes]) -> AsyncGenerator[bytes]:
    for piece in pieces:
        yield piece


async def lines(*pieces: bytes) -> list[bytes]:
    return [line async for line in lines_of(arriving(pieces))]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 100])
async def test_lines_come_out_whole_wherever_they_are_cut(length: int) -> None:
    text = b"first\n\nsecond line\nthird\nhalf of the fourth"
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    assert await lines(*pieces) == [b"first", b"second line", b"third"]


async def test_an_object_of_many_pieces_is_not_copied_at_each_of_them() -> None:
    """15 MiB arrive in pieces of a kilobyte. The reader copies 30 MiB. If it made a copy at each piece, it
    would copy 115 GiB, and the test would time out.
    """
    pieces = [b"x" * 1024] * (15 * 1024)
    (line,) = await lines(*pieces, b"\n")
    assert len(line) == 15 * MIB


async def test_a_line_that_is_longer_than_any_object_is_refused() -> None:
    with pytest.raises(ValueError, match=f"a line has more than {16 * MIB} bytes"):
        await lines(*[b"x" * MIB] * 17)


async def test_the_bound_is_for_one_line_and_not_for_the_sum() -> None:
    assert len(await lines(*[b"x" * MIB, b"\n"] * 20)) == 20


class RefusingClient:
    """Answers each request with 401, and is the answer too."""

    status, released = 401, False

    async def param_serialize(self, *_: object, **__: object) -> tuple[()]:
        return ()

    async def call_api(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(response=self)

    def release(self) -> None:
        self.released = True


async def test_a_refused_answer_is_released_if_there_are_no_new_credentials() -> None:
    async def renew() -> None:
        raise ConfigError("the command fails")

    client = RefusingClient()
    with pytest.raises(ApiError, match="the command fails"):
        await Api(client, renew=renew).request("GET", "/pods")
    assert client.released


KUBECONFIG = """
current-context: here
contexts:
  - {name: there, context: {cluster: c, user: u, namespace: elsewhere}}
  - {name: here, context: {cluster: c, user: u, namespace: models}}
"""


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    return path


def test_the_error_without_the_kubernetes_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, kubeconfig: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "kubernetes" else found(name, *a)
    )
    with pytest.raises(ConfigError, match=r"pip install 'prefix-gateway\[kubernetes\]'"):
        require(Kubernetes(pool="p", kubeconfig=str(kubeconfig)))


def test_the_error_outside_a_pod_asks_for_a_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig: is missing"):
        require(Kubernetes(pool="p"))


def test_the_error_for_a_missing_kubeconfig_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig: /nowhere: No such file"):
        require(Kubernetes(pool="p", kubeconfig="/nowhere"))


def test_the_namespace_is_that_of_the_current_context(kubeconfig: Path) -> None:
    assert namespace_of(Kubernetes(pool="p", kubeconfig=str(kubeconfig))) == "models"
    assert namespace_of(Kubernetes(pool="p", kubeconfig=str(kubeconfig), namespace="mine")) == "mine"


@pytest.mark.parametrize("text", ["[", "[]", "{contexts: [{}]}"])
def test_a_file_that_is_not_a_kubeconfig_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"kubernetes\.namespace: cannot find the namespace of this pod, so please set it"
    ):
        namespace_of(Kubernetes(pool="p", kubeconfig=str(path)))
