"""Shipped test tools: contract suites for stores, and stores and disks that fail on command.

A backend of your own is tested in three lines:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self): return MyStore(...)
"""

from emberkeep.testing.contracts import RepositoryContract, StoreContract
from emberkeep.testing.disk import FaultyDisk, RecordingDisk, power_cut
from emberkeep.testing.stores import Fault, FaultStore, ProcessDied, RecordingStore

__all__ = [
    "Fault",
    "FaultStore",
    "FaultyDisk",
    "ProcessDied",
    "RecordingDisk",
    "RecordingStore",
    "RepositoryContract",
    "StoreContract",
    "power_cut",
]
