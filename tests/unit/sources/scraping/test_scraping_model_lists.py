"""A server's list of models is read strictly where routing depends on the field, and leniently elsewhere."""

import json

import pytest

from epp.sources.scraping.metrics_page import MetricsError
from epp.sources.scraping.model_lists import MOST_CARDS, parse_model_page


def list_page(*cards: object) -> bytes:
    return json.dumps({"object": "list", "data": list(cards)}).encode()


def test_a_list_as_vllm_writes_it_is_read() -> None:
    base = {"id": "llama", "object": "model", "created": 7, "owned_by": "vllm", "root": "/models/llama", "parent": None,
            "max_model_len": 4096, "permission": [{"id": "modelperm-1"}]}  # fmt: skip
    listed = parse_model_page(list_page(base, {**base, "id": "sql", "root": "/loras/sql", "parent": "llama"}))
    assert (listed.base, set(listed.names)) == ("llama", {"llama", "sql"})
    assert listed.adapters == {"sql"}
    model, adapter = listed.cards
    assert (model.max_model_len, model.owned_by, adapter.root) == (4096, "vllm", "/loras/sql")


def test_fields_of_other_types_are_left_out() -> None:
    (card,) = parse_model_page(
        list_page({"id": "m", "created": "today", "max_model_len": -1, "root": 3})
    ).cards
    assert (card.created, card.max_model_len, card.root) == (0, None, None)


@pytest.mark.parametrize(
    "broken",
    [
        b"", b"[]", b"{}", b"\xff", b'{"data": null}', b'{"data": [1]}', list_page(), list_page({"object": "model"}), list_page({"id": ""}),
        list_page({"id": 3}), list_page({"id": "m" * 2000}), list_page({"id": "m", "parent": "p" * 2000}),
        list_page(*({"id": f"m{n}"} for n in range(MOST_CARDS + 1))), b'{"data": [{"id": "\\ud800"}]}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_list_of_models_is_refused(broken: bytes) -> None:
    with pytest.raises(MetricsError) as raised:
        parse_model_page(broken)
    assert len(str(raised.value)) < 300
