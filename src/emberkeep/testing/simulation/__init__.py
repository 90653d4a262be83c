"""A whole cluster on virtual time, as a seed says: see `simulate`."""

from emberkeep.testing.simulation.simulated_run import Outcome, simulate

__all__ = ["Outcome", "simulate"]
