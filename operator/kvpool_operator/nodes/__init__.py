"""A node's daemon in a pod: it follows its KVPoolNode, serves the pool as that says, and reports there."""
