"""The node daemon: one process for each host of a pool. Engines work without it; it keeps the pool tidy."""
