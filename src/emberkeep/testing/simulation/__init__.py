"""A whole cluster on virtual time, as a seed says: see `simulate`."""

from emberkeep.testing.simulation.simulated_run import Outcome, freeze_heap, simulate

__all__ = ["Outcome", "freeze_heap", "simulate"]
