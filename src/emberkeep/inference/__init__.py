"""Rows for inference: followers that keep up with a repository."""

from emberkeep.inference.follower import Follower, View

__all__ = [
    "Follower",
    "View",
]
