"""kvpool on Kubernetes: the operator of KVPool objects, and each node's daemon."""
