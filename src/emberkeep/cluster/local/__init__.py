"""Shards in this process."""
