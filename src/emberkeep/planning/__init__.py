"""Which strategy a job should use: advice from models, emulation from runs."""
