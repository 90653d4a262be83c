"""The machines of a run: servers that are started, moved and started again, a store, and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from emberkeep.blobs import BlobInfo, BlobStore, Buffer, MemoryStore
from emberkeep.blobs.store import as_buffers
from emberkeep.blobs.wrapper import WrapperStore
from emberkeep.cluster.remote.launcher import FixedAddresses, Launcher
from emberkeep.errors import ServerError, StorageError
from emberkeep.runtime.stopping import Stop
from emberkeep.server import epoch as epochs
from emberkeep.testing.simulation.scheduler import Process, Scheduler, current_task
from emberkeep.testing.simulation.short_memory import Shortage
from emberkeep.testing.simulation.sim_network import SimulatedNetwork
from emberkeep.testing.simulation.sim_options import (
    COORDINATOR,
    LEASE,
    PATIENCE,
    Fault,
    Options,
)
from emberkeep.wire.security import Security

_Result = TypeVar("_Result")

_RESTART_SECONDS = 6.0
_STORE_SECONDS = 0.005


class SimulatedStore(WrapperStore):
    """One process's way to the store that all share: it takes time, and may fail."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(world.disk)
        self._world = world
        self._process = process

    @property
    def url(self) -> str:
        return "simulated://store" if self._world.options.servers_write else "memory://store"

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        content = b"".join(as_buffers(data))
        return self._operate(lambda: self.inner.put(name, content))

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        content = bytes(data)
        return self._operate(lambda: self.inner.put_if_absent(name, content))

    def get(self, name: str) -> bytes:
        return self._operate(lambda: self.inner.get(name))

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        return self._operate(lambda: self.inner.get_range(name, start, length))

    def size(self, name: str) -> int:
        return self._operate(lambda: self.inner.size(name))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        return iter(self._operate(lambda: list(self.inner.list(prefix))))

    def delete(self, names: Iterable[str]) -> None:
        doomed = list(names)
        self._operate(lambda: self.inner.delete(doomed))

    def _operate(self, perform: Callable[[], _Result]) -> _Result:
        task, random = current_task(), self._world.scheduler.random
        if task is None or not self._process.alive:
            raise StorageError("the simulation is over")
        task.scheduler.block("the store", random.random() * _STORE_SECONDS)
        lot = random.random() if self._world.disk_fails else 1.0
        if lot < 0.4:
            if lot < 0.2:
                perform()  # and its answer is lost
            raise StorageError("injected: the store does not answer")
        return perform()


class World:
    """All processes of a run, and its story: a line for everything that is worth telling."""

    def __init__(self, options: Options, scheduler: Scheduler) -> None:
        self.options = options
        self.scheduler = scheduler
        self.harness = Process("the harness")
        self.network = SimulatedNetwork(scheduler, self.harness)
        self.disk = MemoryStore(self.network.clock(self.harness))
        self.disk_fails = 0
        self.launch_fails = 0
        self.short: dict[Process, Shortage] = {}
        self.replaced: set[Process] = set()
        """Trainers that are stopped, and wake beside another that was started meanwhile."""
        self.trainers: list[Process] = []
        self.story: list[str] = []
        self.happened: Counter[str] = Counter()
        self.faults_end = 0.0
        self._lives: Counter[str] = Counter()
        self._closed = False

    def tell(self, line: str) -> None:
        self.story.append(f"{self.scheduler.seconds:9.3f}  {line}")

    def store(self, process: Process) -> BlobStore:
        return SimulatedStore(self, process)

    # -- processes -------------------------------------------------------------------------------

    def process(self, host: str) -> Process:
        """Another life at that host."""
        self._lives[host] += 1
        return Process(f"{host}#{self._lives[host]}", host)

    def launcher(self, process: Process) -> Launcher:
        """What a trainer starts servers with; those that are there stay."""
        addresses = [address_of(shard) for shard in range(self.options.shards)]
        network = self.network
        if self.options.launches == "fixed":
            return FixedAddresses(
                addresses, Security(), patience=PATIENCE,
                transport=network.transport(process), clock=network.clock(process),
            )  # fmt: skip
        return _Launcher(self, process, moves=self.options.launches == "moved")

    def start_server(self, address: str) -> None:
        before = self.network.servers.get(address)
        if before is not None and before.process.alive:
            return
        self.network.start(self.process(address), address)

    def kill(self, process: Process) -> None:
        if process.alive:
            self.scheduler.kill(process)
            self.tell(f"{process} dies")
            if self.options.scenario or self.scheduler.random.random() < 0.5:
                self.network.hang_up(process)  # else nobody hears more of it, nor of its machine

    # -- faults ----------------------------------------------------------------------------------

    def schedule(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self.scheduler.at(fault.at, partial(self._begin, fault))
            self.faults_end = max(self.faults_end, fault.at + fault.seconds)

    def _begin(self, fault: Fault) -> None:
        if self._closed:
            return
        if fault.on:
            begin = partial(self._begin, replace(fault, on=""))
            if fault.kind == "kill":
                begin = partial(self.scheduler.at, fault.delay, begin)
            question = (self._address(fault.by), fault.on, fault.times)
            self.network.awaited.setdefault(question, []).append(begin)
            return
        end = self._apply(fault)
        if end is None:
            return
        self.happened[fault.kind] += 1
        self.network.probe_later()
        self.tell(f"fault: {fault}")
        if fault.seconds:
            self.scheduler.at(fault.seconds, partial(self._end, fault, end))

    def _end(self, fault: Fault, end: Callable[[], object]) -> None:
        end()
        self.tell(f"over: {fault.kind}")

    def close(self) -> None:
        """No fault begins any more."""
        self._closed = True

    def _apply(self, fault: Fault) -> Callable[[], object] | None:
        """Begins a fault; what ends it, None if there is nobody that it could strike."""
        nothing = partial(int)
        if fault.kind == "storm":
            return self._storm(fault)
        if fault.kind == "disk":
            self.disk_fails += 1
            return self._mend_disk
        if fault.kind == "launch":
            self.launch_fails += 1
            return self._can_launch
        if fault.kind in ("kill trainer", "pause trainer", "replace trainer"):
            running = [trainer for trainer in self.trainers if trainer.alive]
            if not running:
                return None
            process = running[fault.target % len(running)]
            if fault.kind == "kill trainer":
                self.kill(process)
                return nothing
            if fault.kind == "replace trainer":
                self.replaced.add(process)
            self.scheduler.pause(process)
            return partial(self.scheduler.resume, process)
        address = self._address(fault.target)
        if fault.kind in ("cut", "part", "lag"):
            return self._cut(fault, address)
        if fault.kind == "late":
            self.network.late[address] += 1
            return partial(self._in_time, address)
        server = self.network.servers.get(address)
        if server is None or not server.process.alive:
            return None
        process = server.process
        if fault.kind == "kill":
            if fault.inward:  # in the very moment after a push was acknowledged
                die = partial(self._die, process, address)
                self.network.after_push[address] = (die, fault.unheard)
            else:
                self._die(process, address)
            return nothing
        if fault.kind == "memory":
            self.short[process] = Shortage(fault.times, after=fault.inward)
            return nothing
        if fault.kind == "jump":
            process.jumped += timedelta(hours=self.scheduler.random.randint(-48, 48))
            return nothing
        self.scheduler.pause(process)
        return partial(self.scheduler.resume, process)

    def _die(self, process: Process, address: str) -> None:
        self.kill(process)
        self._restart_later(address)

    def _address(self, shard: int) -> str:
        """Where a shard's newest server is."""
        newest, address = f"{address_of(shard)}'", address_of(shard)
        while newest in self.network.servers:
            address, newest = newest, newest + "'"
        return address

    def _restart_later(self, address: str) -> None:
        """Who looks after servers at fixed addresses starts them again."""
        if self.options.launches == "fixed":
            seconds = 0.1 + self.scheduler.random.random() * _RESTART_SECONDS
            self.scheduler.at(seconds, partial(self._start_again, address))

    def _start_again(self, address: str) -> None:
        self.scheduler.spawn(f"start {address}", partial(self.start_server, address), self.harness)

    def _storm(self, fault: Fault) -> Callable[[], object]:
        weather = self.network.weather
        for name, share in fault.shares.items():
            setattr(weather, name, share)
        return weather.calm

    def _in_time(self, address: str) -> None:
        self.network.late[address] -= 1

    def _can_launch(self) -> None:
        self.launch_fails -= 1

    def _mend_disk(self) -> None:
        self.disk_fails -= 1

    def _cut(self, fault: Fault, address: str) -> Callable[[], object]:
        hosts = [self._address(shard) for shard in range(self.options.shards)]
        others = [host for host in hosts if host != address]
        others += sorted({trainer.host for trainer in self.trainers})
        if fault.other == COORDINATOR:
            others = ["trainer-0"]
        elif fault.other is not None:
            others = [self._address(fault.other)]
        paths = []
        for host in others:
            if fault.kind == "part" or not fault.inward:
                paths.append((address, host))
            if fault.kind == "part" or fault.inward:
                paths.append((host, address))
        if fault.kind == "lag":
            self.network.lags.update(dict.fromkeys(paths, fault.delay))
            return partial(self._hurry, paths)
        for path in paths:
            self.network.cut(path)
        return partial(self._mend, paths)

    def _hurry(self, paths: Iterable[tuple[str, str]]) -> None:
        for path in paths:
            self.network.lags.pop(path, None)

    def _mend(self, paths: Iterable[tuple[str, str]]) -> None:
        for path in paths:
            self.network.mend(path)


def address_of(shard: int) -> str:
    return f"127.0.0.1:{7000 + shard}"


class _Launcher:
    """Starts servers itself. One that does not answer is ended before another takes its place; with
    `moves` it cannot be, as on a machine that nobody reaches: the other is elsewhere, once the
    lease has passed."""

    def __init__(self, world: World, process: Process, *, moves: bool) -> None:
        self._world = world
        self._clock = world.network.clock(process)
        self.stop = Stop(self._clock)
        self._moves = moves

    @property
    def count(self) -> int:
        return self._world.options.shards

    def address(self, shard: int) -> str:
        return self._world._address(shard)

    @property
    def replaceable(self) -> bool:
        return True

    def gone(self, shard: int, life: str) -> bool:
        server = self._world.network.servers.get(self.address(shard))
        return server is None or not server.process.alive

    def replace(self, shard: int, life: str) -> str:
        world, address = self._world, self._world._address(shard)
        server = world.network.servers.get(address)
        if server is not None and server.process.alive and server.service.life != life:
            return address  # it was replaced meanwhile, by another trainer
        if world.launch_fails:
            self._clock.sleep(0.5)
            raise ServerError("injected: there is no room for another server")
        if not self._moves:
            if server is not None:
                world.kill(server.process)
            self._clock.sleep(0.5)
        else:
            gone = server is None or not server.process.alive
            self._clock.sleep(0.5 if gone else 1.5 * LEASE.total_seconds())
            address += "'"
            if address in world.network.servers:
                raise ServerError(f"{address} was started by somebody else")
        world.start_server(address)
        return address

    def close(self) -> None:
        """They end with the simulation."""


@contextmanager
def stores_of(world: World) -> Iterator[None]:
    """Servers that open a store by its URL get their way to the one that all share."""
    before = getattr(epochs, "open_store")  # noqa: B009

    def open_store(_url: str, **_: Any) -> BlobStore:
        task = current_task()
        assert task is not None
        return world.store(task.process)

    setattr(epochs, "open_store", open_store)  # noqa: B010
    try:
        yield
    finally:
        setattr(epochs, "open_store", before)  # noqa: B010
