"""Shards in other processes, behind Arrow Flight: the client's side."""
