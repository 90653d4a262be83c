"""Protects a model that is made of torch modules: saved beside training, resumed to the bit."""

from emberkeep.keeper.costs import Costs
from emberkeep.keeper.keeper import Keeper
from emberkeep.keeper.recovering import Recovered, Recoveries
from emberkeep.keeper.tiers import TierKeeper

__all__ = ["Costs", "Keeper", "Recovered", "Recoveries", "TierKeeper"]
