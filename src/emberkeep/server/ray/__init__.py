"""Shard servers that Ray places and supervises."""
