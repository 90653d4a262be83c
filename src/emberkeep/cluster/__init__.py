"""Shards behind one client."""
