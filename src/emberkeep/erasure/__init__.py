"""Rows of different shards coded together: what one shard loses, the others give back."""
