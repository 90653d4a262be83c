"""A state machine against a perfect model: random histories of saves, faults, deaths, gc."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emberkeep.blobs import MemoryStore
from emberkeep.errors import (
    ConfigError,
    FencedError,
    NoVersionError,
    StateError,
    StorageError,
)
from emberkeep.repository import (
    Collector,
    KeepAll,
    KeepEvery,
    KeepLast,
    KeepNamed,
    Manifest,
    Pin,
    Repository,
    VersionId,
    Writer,
    verify,
)
from emberkeep.testing import Fault, FaultStore, ProcessDied
from emberkeep.testing.contracts import check_content, save
from emberkeep.testing.virtual_clock import VirtualClock
from tests.nightly import examples

POLICIES = [KeepLast(n=1), KeepLast(n=2) | KeepNamed(), KeepEvery(m=3) | KeepNamed(), KeepAll()]
# Our stores never tear under a name; the scripted faults cover a store that does.
FAULTS = [Fault.FAIL, Fault.LOSE, Fault.DELAY, Fault.DIE_BEFORE, Fault.DIE_AFTER]


class Process:
    """One process with its own view of the store; may be asleep for a long time."""

    def __init__(self, memory: MemoryStore, clock: VirtualClock) -> None:
        self.store = FaultStore(memory)
        self.repository = Repository.open(self.store, clock=clock)
        self.writer: Writer | None = None
        self.pins: list[Pin] = []


class Model(RuleBasedStateMachine):
    """The model is the list of versions that were acknowledged to somebody.

    Two processes write, collect and die; the model knows what must still be there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.memory = MemoryStore(self.clock)
        Repository.create(self.memory, schema={}, clock=self.clock)
        self.clean = Repository.open(self.memory, clock=self.clock)
        self.processes = [Process(self.memory, self.clock) for _ in range(2)]
        self.acknowledged: dict[VersionId, Manifest] = {}
        self.newest: VersionId | None = None
        self.steps = 0

    def attempt(self, process: Process, action) -> object:
        """Runs an action; a death replaces the process, failures are nobody's loss."""
        try:
            return action()
        except ProcessDied:
            process.store.deliver()
            self.processes[self.processes.index(process)] = Process(self.memory, self.clock)
        except FencedError:
            process.writer = None
        except StorageError:
            pass
        return None

    @rule(which=st.integers(0, 1), at=st.integers(0, 12), fault=st.sampled_from(FAULTS))
    def arm(self, which: int, at: int, fault: Fault) -> None:
        store = self.processes[which].store
        store.faults = {store.count + at: fault}

    @rule(which=st.integers(0, 1))
    def open(self, which: int) -> None:
        process = self.processes[which]
        process.writer = self.attempt(process, lambda: Writer.open(process.repository))

    @precondition(lambda self: any(p.writer for p in self.processes))
    @rule(which=st.integers(0, 1), back=st.integers(0, 3))
    def save(self, which: int, back: int) -> None:
        process = self.processes[which]
        writer = process.writer
        if writer is None:
            return
        self.steps += 1

        def action() -> Manifest:
            settled = writer.settle()
            if settled is not None:
                self.acknowledge(settled)
            versions = process.repository.versions()
            needs = [versions[-back]] if 0 < back <= len(versions) else []
            try:
                return save(writer, self.steps, needs=needs)
            except NoVersionError:
                return save(writer, self.steps)

        manifest = self.attempt(process, action)
        if manifest is not None:
            self.acknowledge(manifest)

    def acknowledge(self, manifest: Manifest) -> None:
        self.acknowledged[manifest.version] = manifest
        assert self.newest is None or manifest.version.number > self.newest.number
        self.newest = manifest.version

    @precondition(lambda self: any(p.writer for p in self.processes))
    @rule(which=st.integers(0, 1), policy=st.sampled_from(POLICIES))
    def collect(self, which: int, policy) -> None:
        process = self.processes[which]
        if process.writer is not None:
            collector = Collector(process.writer, policy=policy, grace=timedelta(0))
            self.attempt(process, collector.collect)

    @rule(which=st.integers(0, 1), index=st.integers(0, 5))
    def pin(self, which: int, index: int) -> None:
        process = self.processes[which]
        versions = self.clean.versions()
        if versions:
            version = versions[index % len(versions)]
            try:
                pin = self.attempt(process, lambda: Pin(process.repository, version))
            except NoVersionError:
                return
            if isinstance(pin, Pin):
                process.pins.append(pin)

    @rule(which=st.integers(0, 1))
    def release(self, which: int) -> None:
        process = self.processes[which]
        if process.pins:
            self.attempt(process, process.pins.pop().release)

    @rule(minutes=st.sampled_from([1, 90]))
    def pass_time(self, minutes: int) -> None:
        self.clock.advance(timedelta(minutes=minutes))

    @rule(which=st.integers(0, 1), name=st.sampled_from(["a", "b"]), index=st.integers(0, 5))
    def tag(self, which: int, name: str, index: int) -> None:
        process = self.processes[which]
        versions = self.clean.versions()
        if versions:
            version = versions[index % len(versions)]
            try:
                self.attempt(process, lambda: process.repository.tag(name, version))
            except (ConfigError, NoVersionError, StateError):
                return

    @rule(name=st.sampled_from(["a", "b"]))
    def untag(self, name: str) -> None:
        self.clean.untag(name)

    @rule(which=st.integers(0, 1))
    def deliver(self, which: int) -> None:
        self.processes[which].store.deliver()

    @invariant()
    def the_history_is_what_was_acknowledged(self) -> None:
        versions = self.clean.versions()
        if self.newest is not None:
            # The newest acknowledged version is never lost, and only one whose answer was lost
            # can stand above it.
            assert self.newest in versions
        numbers = [version.number for version in versions]
        assert numbers == sorted(set(numbers))
        for version in versions:
            for manifest in self.clean.chain(version):
                for file in manifest.files:
                    self.clean.read(file)
            if version in self.acknowledged:
                check_content(self.clean, self.acknowledged[version])
        for process in self.processes:
            for pin in process.pins:
                if pin._expires is not None and pin._expires > self.clock.now():
                    for manifest in self.clean.chain(pin.version):
                        check_content(self.clean, self.acknowledged.get(manifest.version, manifest))

    def teardown(self) -> None:
        for process in self.processes:
            process.store.deliver()
        writer = Writer.open(self.clean)
        manifest = save(writer, 1000)
        self.clock.advance(timedelta(days=1))
        for name in ("a", "b"):
            self.clean.untag(name)
        Collector(writer, policy=KeepLast(n=1), grace=timedelta(0)).collect()
        assert self.clean.versions() == (manifest.version,)
        assert {i.name for i in self.memory.list("data")} == {f.name for f in manifest.files}
        assert verify(self.clean).ok


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=examples(150), stateful_step_count=40)
