"""Protects a model that is made of torch modules: saved beside training, resumed to the bit."""

from emberkeep.keeper.costs import Costs
from emberkeep.keeper.keeper import Keeper
from emberkeep.keeper.recoverer import Recovered, Recoveries
from emberkeep.keeper.tier_keeper import TierKeeper

__all__ = ["Costs", "Keeper", "Recovered", "Recoveries", "TierKeeper"]
