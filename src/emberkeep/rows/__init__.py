"""Rows in memory: slabs, their slots, lookups, snapshots, and which of them changed."""
