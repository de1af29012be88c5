"""A real Kubernetes cluster on one Linux machine: its nodes are namespaces, not virtual machines."""
