"""Sharding drivers: how a plan's GATHER, FREE, REDUCE and BEGIN_BACKWARD reach a sharded model, or nothing."""
