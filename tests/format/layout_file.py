"""Reading a region's bytes with nothing but the printed layout: what another program would have to go by.

`layout.txt` is the snapshot of what `kvpool layout` prints. If a field moves and the table does not say so,
these readers find garbage.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LAYOUT = Path(__file__).with_name("layout.txt")
LINE_BYTES = 64
STATES = ("free", "writing", "stable", "lent")

Fields = dict[str, tuple[int, int]]  # name -> offset, size


def sections(text: str) -> dict[str, Fields]:
    """The tables of the layout: first words of the title -> fields."""
    out: dict[str, Fields] = {}
    fields: Fields = {}
    for line in text.splitlines():
        if title := re.fullmatch(r"(\S.*), \d+ bytes", line):
            fields = out.setdefault(title[1].split(" (")[0], {})
        elif row := re.match(r"\s+(\d+)\s+(\d+)  (\S+)", line):
            fields[row[3]] = (int(row[1]), int(row[2]))
    return out


SECTIONS = sections(LAYOUT.read_text())


@dataclass(frozen=True)
class Place:
    """A named range of a region's bytes."""

    what: str
    start: int
    bytes: int

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.start + self.bytes


class RegionBytes:
    """Finds things in the bytes of a region. Reads only."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.data = data
        self.sb = {
            name: self.number("superblock", name, 0) for name in SECTIONS["superblock"] if name != "uuid"
        }

    def number(self, section: str, field: str, at: int) -> int:
        offset, size = SECTIONS[section][field]
        return int.from_bytes(self.data[at + offset : at + offset + size], "little")

    def raw(self, section: str, field: str, at: int) -> bytes:
        offset, size = SECTIONS[section][field]
        return bytes(self.data[at + offset : at + offset + size])

    def shard(self, host: int) -> Place:
        return Place(
            f"shard {host}", self.sb["shard_offset"] + host * self.sb["shard_bytes"], self.sb["shard_bytes"]
        )

    def within_shard(self, host: int, what: str, field: str, size: int) -> Place:
        return Place(f"{what} of shard {host}", self.shard(host).start + self.sb[field], size)

    def claims(self, host: int) -> Place:
        return self.within_shard(host, "claims", "claims_offset", self.sb["host_count"] * LINE_BYTES)

    def namespaces(self, host: int) -> Place:
        return self.within_shard(
            host, "namespace rows", "namespaces_offset", self.sb["namespace_count"] * 1024
        )

    def buckets(self, host: int) -> Place:
        return self.within_shard(host, "buckets", "buckets_offset", self.sb["bucket_count"] * LINE_BYTES)

    def header(self, host: int, extent: int, slot: int) -> Place:
        start = (
            self.shard(host).start
            + self.sb["extents_offset"]
            + extent * self.sb["extent_bytes"]
            + slot * LINE_BYTES
        )
        return Place(f"header of shard {host} extent {extent} slot {slot}", start, LINE_BYTES)

    def payload(self, host: int, extent: int, slot: int, slot_bytes: int) -> Place:
        start = self.header(host, extent, 0).start + self.sb["extent_payload_offset"] + slot * slot_bytes
        return Place(f"payload of shard {host} extent {extent} slot {slot}", start, slot_bytes)

    def state(self, header: Place) -> str:
        return STATES[self.number("slot header", "word", header.start) >> 62]

    def key(self, header: Place) -> bytes:
        return self.raw("slot header", "key", header.start)

    @cached_property
    def stored(self) -> dict[bytes, tuple[int, int, int]]:
        """key -> (host, extent, slot) of every stable slot."""
        found = {}
        for host in range(self.sb["host_count"]):
            for extent in range(self.sb["extent_count"]):
                for slot in range(self.sb["slots_per_extent"]):
                    header = self.header(host, extent, slot)
                    if self.state(header) == "stable":
                        found[self.key(header)] = (host, extent, slot)
        return found
