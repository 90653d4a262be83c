"""Protects a model that is made of torch modules: saved beside training, resumed to the bit."""

from emberkeep.keeper.costs import Costs
from emberkeep.keeper.keeper import Keeper

__all__ = ["Costs", "Keeper"]
