"""What holds for all tests."""

import os

from hypothesis import settings

# `kvpool up` of a test starts no status API: it would be one process more for each, and they share a port.
os.environ["KVPOOL_API_PORT"] = "off"

# A test that took long once has shown that the machine was busy, and nothing else.
settings.register_profile("kvpool", deadline=None)
settings.load_profile("kvpool")
