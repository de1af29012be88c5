"""`python -m kvpool` is the `kvpool` command."""

from __future__ import annotations

from kvpool.cli import main

if __name__ == "__main__":
    main()
