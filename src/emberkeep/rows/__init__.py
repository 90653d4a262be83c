"""Rows in memory: slabs, their slots, lookups, snapshots, and who changed."""
