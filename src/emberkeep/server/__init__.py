"""Shard servers: one shard of a cluster behind Arrow Flight."""
