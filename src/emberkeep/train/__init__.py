"""The training run of `emberkeep train`, from its settings to its result."""
