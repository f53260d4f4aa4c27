"""Small prefix tables for tests. Chunks are one byte each, so sizes are easy to follow."""

from epp.base.types import ChunkHash, EndpointName
from epp.config.policy import Chunks
from epp.picker.prefix_index.table import PrefixTable
from epp.picker.prefix_index.upkeep import add_endpoint
from epp.picker.server_caches import hash_chain

SCHEDULE = Chunks(size_bytes=1, later_size_bytes=1, later_from_bytes=0)
A, B, C = EndpointName("a"), EndpointName("b"), EndpointName("c")


def chain(text: str) -> list[ChunkHash]:
    return hash_chain(text.encode(), seed=1, schedule=SCHEDULE)


def new_table(*names: EndpointName, capacity_bytes: int = 1000) -> PrefixTable:
    table = PrefixTable(schedule=SCHEDULE, max_entries=1000)
    for name in names:
        add_endpoint(table, name, capacity_bytes=capacity_bytes)
    return table
