"""The persisted layout is what the snapshot says, byte by byte."""

from __future__ import annotations

from format.layout_file import LAYOUT, SECTIONS
from kvpool import _native


def test_layout_printed_equals_snapshot() -> None:
    printed = _native.layout_table()
    assert printed == LAYOUT.read_text(), (
        "the region format changed. If that is meant: raise the format version (unless only words changed), "
        "add its golden region (tests/format/make_golden.py), write `kvpool layout` to layout.txt beside "
        "this test and say in CHANGELOG.md what an older build does on meeting it"
    )


def test_layout_fields_do_not_overlap_and_words_are_aligned() -> None:
    for title, fields in SECTIONS.items():
        end = 0
        for name, (offset, size) in sorted(fields.items(), key=lambda f: f[1]):
            assert offset >= end, f"{title}: {name} at {offset} overlaps what lies before it"
            assert size not in (2, 4, 8) or offset % size == 0, (
                f"{title}: {name} at {offset} is not aligned to its {size} bytes"
            )
            end = offset + size
