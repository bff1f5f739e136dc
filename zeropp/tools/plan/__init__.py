"""The planner: bytes, memory and time of a training step, before there is a cluster to run it on."""
