"""Settings that every test shares."""

from __future__ import annotations

import os

# Tests run in several processes at once, and none of them depends on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("EMBERKEEP_QUIET", "1")

from hypothesis import HealthCheck, settings

# The first example may compile kernels, so time is not judged. Examples are the same in every run:
# a failure repeats, and a change is not blamed for an example that nobody has seen before.
settings.register_profile(
    "emberkeep",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("emberkeep")
