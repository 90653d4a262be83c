"""Compiled loops over arrays: free functions, whose callers own the outputs."""
