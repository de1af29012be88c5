"""What holds for all tests."""

import os

# `kvpool up` of a test starts no status API: it would be one process more for each, and they share a port.
os.environ["KVPOOL_API_PORT"] = "off"
