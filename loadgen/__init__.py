"""Experiments: simulated replicas, workloads, the demo."""
