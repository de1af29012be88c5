"""`python -m guest check`: whether guests can be made here. `image` makes what they boot from."""

from __future__ import annotations

import sys

from guest import image


def main(arguments: list[str]) -> int:
    lacking = image.lacking()
    for line in lacking:
        print(f"guest: {line}", file=sys.stderr)
    if lacking or arguments == ["check"]:
        return 1 if lacking else 0
    if arguments == ["image"]:
        print(image.base())
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
