"""Rows that live in a file behind a cache in memory; see `tiered_slab.TieredSlab`."""
