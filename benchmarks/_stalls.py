"""What a checkpoint takes from training that runs beside it, for every contender alike.

The stall is the wall time of the steps from the request to the commit, less as many undisturbed
steps: their median just before and just after. Contenders take turns, round after round, so that
rounds are pairs. Processor time is that of a save with nothing beside it, of all threads and
processes, and of the whole machine, where writing back pages is somebody else's.

The kinds of training were fixed, and their rounds with them, before any of their figures was seen:
rows alone (9 rounds, about 6 minutes on a quiet machine of two cores), rows beside an emulated
accelerator (5, about 4), and a DLRM over the same rows (5, about 5).
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from _common import instructions, timed
from emberkeep.blobs import direct_file
from emberkeep.blobs.direct_file import BUFFER_NBYTES
from emberkeep.blobs.system_disk import BLOCK_NBYTES, Disk
from emberkeep.checkpoint import SaveSettings, VersionSpec
from emberkeep.codecs import Quantized
from emberkeep.keeper import Keeper
from emberkeep.models import DLRM, TERABYTE
from emberkeep.repository import KeepLast
from emberkeep.repository.digests import Digester
from emberkeep.rows.row_source import Arrays
from emberkeep.runtime.memory import recycled
from emberkeep.strategies import Every, Strategy

UNDISTURBED = 10  # steps before a request and after a commit
# What an accelerator computes while the cores do nothing.
EMULATED_MS = 40.0
# Of the DLRM: the shape whose vectors are as wide as the tables. So many samples take 97 core-ms a
# step on one thread, 70 of them for rows: 40 to 60 ms on two cores.
SHAPE, SAMPLES, DENSE = TERABYTE, 512, 13


class Model(Protocol):
    """What is trained and saved."""

    bags: Any

    @property
    def planes(self) -> dict[str, Any]: ...

    @property
    def nbytes(self) -> int: ...

    def step(self) -> None: ...

    def next(self) -> int:
        """The number of the batch whose turn it is."""
        ...

    def lookups(self, number: int) -> list[Any]:
        """The ids of a batch by table, repeated ones included."""
        ...

    def change(self) -> None: ...


class Contender:
    """One way to save. `start` returns when training may go on; the function that it returns says
    whether the checkpoint is durable, and raises what went wrong."""

    name: str

    def start(self) -> Callable[[], bool]:
        raise NotImplementedError

    def close(self) -> None:
        """Removes what it wrote."""


class Ours(Contender):
    """A version, through `Keeper`; an increment holds what changed since the version before."""

    def __init__(
        self, model: Model, place: Path, *, bits: int | None, increment: bool,
        share: float | None = None,
    ) -> None:  # fmt: skip
        self.name = f"emberkeep, {'increment' if increment else 'full'}"
        self.name += "" if bits is None else f", {bits} bits"
        self.name += "" if share is None else f", background_share={share}"
        self._model, self._place, self._increment = model, place, increment
        self._settings = SaveSettings(grace=timedelta(0), background_share=share)
        layout: Any = "consecutive" if increment else "full"
        self._spec = VersionSpec(layout=layout, bits=bits)
        self._keeper: Keeper | None = None
        self._path: Path | None = None
        self.held_ms: float | None = None
        """How long pushes were held up by the newest version, once closed."""

    def start(self) -> Callable[[], bool]:
        keeper = self._ready()
        saving = keeper.save()
        assert saving is not None

        def done() -> bool:
            if not saving.committed.done():
                return False
            kind = saving.committed.result().layout["kind"]
            assert (kind != "full") == self._increment, kind
            return True

        return done

    def _ready(self) -> Keeper:
        if self._keeper is None:
            self._path = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=self._place))
            bags = self._model.bags
            self._keeper = Keeper(
                self._path, bags, bags.optimizer,
                strategy=Strategy(
                    spec=self._spec, schedule=Every(steps=10**9), retention=KeepLast(n=1)
                ),
                settings=self._settings,
            )  # fmt: skip
            if self._increment:
                self._keeper.save()
                self._keeper.wait()
        return self._keeper

    def before(self) -> None:
        """What is not measured: for an increment the baseline, and the changes since."""
        self._ready()
        if self._increment:
            self._model.change()

    def close(self) -> None:
        if self._keeper is not None and self._path is not None:
            self._keeper.close(save=False)
            self.held_ms = self._keeper.costs().each[-1].held_ms
            shutil.rmtree(self._path)
            self._keeper = None


class Peer(Contender):
    """Saves all planes as tensors into a directory of its own."""

    def __init__(
        self, name: str, model: Model, place: Path,
        save: Callable[[dict[str, Any], Path], Callable[[], bool]],
    ) -> None:  # fmt: skip
        self.name = name
        self._model, self._place, self._save = model, place, save
        self._paths: list[Path] = []

    def start(self) -> Callable[[], bool]:
        path = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=self._place))
        self._paths.append(path)
        state = {name: torch.from_numpy(plane) for name, plane in self._model.planes.items()}
        return self._save(state, path)

    def close(self) -> None:
        for path in self._paths:
            shutil.rmtree(path)
        self._paths = []


def _torch_thread(state: dict[str, Any], path: Path) -> Callable[[], bool]:
    """A copy, so that later steps are not in it, then torch.save and fsync in a thread."""
    copied = {name: tensor.clone() for name, tensor in state.items()}
    ended: list[BaseException | None] = []

    def save() -> None:
        try:
            with open(path / "model.pt", "wb") as file:
                torch.save(copied, file)
                file.flush()
                os.fsync(file.fileno())
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    threading.Thread(target=save).start()
    return lambda: _ended(ended)


def _torch_blocking(state: dict[str, Any], path: Path) -> Callable[[], bool]:
    with open(path / "model.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: True


def _ended(ended: list[BaseException | None]) -> bool:
    if ended and ended[0] is not None:
        raise ended[0]
    return bool(ended)


def _dcp(kind: str) -> Callable[[dict[str, Any], Path], Callable[[], bool]]:
    def save(state: dict[str, Any], path: Path) -> Callable[[], bool]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        future: Any = dcp.async_save(
            state, checkpoint_id=str(path / "dcp"),
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )  # fmt: skip
        future = getattr(future, "upload_completion", future)

        def done() -> bool:
            if future.done():
                future.result()
            return bool(future.done())

        return done

    return save


def peers(model: Model, place: Path) -> list[Contender]:
    """torch.save and DCP's async_save, each as its users run it. Needs a process group."""
    return [
        Peer("torch.save", model, place, _torch_blocking),
        Peer("torch.save in a thread", model, place, _torch_thread),
        Peer("DCP async_save, thread", model, place, _dcp("thread")),
        Peer("DCP async_save, process", model, place, _dcp("process")),
    ]


class process_group:
    """One rank with a store that other processes of this machine reach, as DCP needs."""

    def __enter__(self) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        os.environ["MASTER_PORT"] = str(store.port)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


# -- stalls ------------------------------------------------------------------------------------


class Embedding:
    """Pulls and pushes alone: every core is busy with rows."""

    name = "embedding only"

    def __init__(self, model: Model) -> None:
        self.step = model.step


class Recommender:
    """A whole step of a DLRM over the tables: the rows that `Embedding` pulls and pushes are looked
    up as bags, go through the network and back, and all of it is updated."""

    name = "DLRM"

    def __init__(self, model: Model) -> None:
        self._model = model
        self._net = DLRM(model.bags, SHAPE, features=len(model.bags.tables))
        dense = [*self._net.bottom.parameters(), *self._net.top.parameters()]
        self._optimizer = torch.optim.SGD(dense, lr=1e-3)
        torch.manual_seed(0)
        self._columns = torch.rand(SAMPLES, DENSE)
        self._labels = (torch.rand(SAMPLES) < 0.25).float()
        self._made: dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}

    def step(self) -> None:
        number = self._model.next()
        if number not in self._made:
            self._made[number] = self._bags_of(number)
        logits = self._net(self._columns, self._made[number])
        torch.nn.functional.binary_cross_entropy_with_logits(logits, self._labels).backward()
        self._model.bags.optimizer.step()
        self._optimizer.step()
        self._model.bags.optimizer.zero_grad()
        self._optimizer.zero_grad()

    def _bags_of(self, number: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The lookups of a batch, as many for each sample."""
        found = {}
        for table, ids in zip(self._model.bags.tables, self._model.lookups(number), strict=True):
            ends = torch.from_numpy(np.linspace(0, len(ids), SAMPLES, endpoint=False).astype(int))
            found[table.name] = torch.from_numpy(ids), ends
        return found


class Emulated:
    """Rows, and a wait as long as an accelerator would compute."""

    name = f"emulated compute, {EMULATED_MS:g} ms"

    def __init__(self, model: Model) -> None:
        self._model = model

    def step(self) -> None:
        self._model.step()
        time.sleep(EMULATED_MS / 1e3)


@dataclass
class Stalls:
    """Of one contender beside one kind of training, one entry per round."""

    seconds: list[float] = field(default_factory=list)
    commit_seconds: list[float] = field(default_factory=list)
    held_ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        low, high = interval(lambda rounds: float(np.median(np.array(self.seconds)[rounds])), self)
        return f"{self.median:.2f} ({low:.2f} to {high:.2f})"


def interval(figure: Callable[[Any], float], of: Stalls) -> tuple[float, float]:
    """The 95% interval of a figure of some rounds, by drawing rounds again; what is compared is
    drawn together, as it was measured."""
    random = np.random.default_rng(0)
    count = len(of.seconds)
    drawn = [figure(random.integers(0, count, count)) for _ in range(2000)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def beside_best(ours: Stalls, theirs: Iterable[Stalls]) -> tuple[float, float, float]:
    """Our stall as a part of that of the best of them, medians; and its 95% interval."""
    peers = list(theirs)

    def ratio(rounds: Any) -> float:
        best = min(float(np.median(np.array(peer.seconds)[rounds])) for peer in peers)
        return float(np.median(np.array(ours.seconds)[rounds])) / best

    return ratio(np.arange(len(ours.seconds))), *interval(ratio, ours)


def stall(
    contender: Contender, step: Callable[[], None], undisturbed: int = UNDISTURBED
) -> tuple[float, float]:
    """Seconds that training lost to one checkpoint, and seconds from request to commit."""
    if isinstance(contender, Ours):
        contender.before()
    alone = timed(step, undisturbed)
    steps, start = 0, time.perf_counter()
    done = contender.start()
    while not done():
        step()
        steps += 1
    total = time.perf_counter() - start
    alone += timed(step, undisturbed)
    return total - steps * statistics.median(alone), total


def stalls(
    contenders: Iterable[Contender], training: Any, rounds: int, undisturbed: int = UNDISTURBED
) -> dict[str, Stalls]:
    """By contender; in each round the next one begins."""
    order = list(contenders)
    found = {contender.name: Stalls() for contender in order}
    timed(training.step, 3 * undisturbed)  # the first steps of a process are slower
    for number in range(rounds):
        turn = number % len(order)
        for contender in order[turn:] + order[:turn]:
            seconds, commit = stall(contender, training.step, undisturbed)
            found[contender.name].seconds.append(seconds)
            found[contender.name].commit_seconds.append(commit)
            contender.close()
            held = ""
            if isinstance(contender, Ours) and contender.held_ms is not None:
                found[contender.name].held_ms.append(contender.held_ms)
                held = f", pushes held up for {contender.held_ms:.0f} ms"
            print(f"{training.name}: {contender.name}: {seconds:.2f} s{held}", flush=True)
    return found


# -- processor time ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds of all our threads and processes, and of the whole machine."""

    own: float
    machine: float
    instructions: int | None = None
    """Of our threads and the processes that they start; None where the machine offers no count."""


def processor_time(contender: Contender) -> ProcessorTime:
    """What a save takes with nothing beside it, from the request to the commit."""
    if isinstance(contender, Ours):
        contender.before()
    own, machine = _own_seconds(), _machine_seconds()
    with instructions() as counted:
        done = contender.start()
        while not done():
            time.sleep(0.005)
        spent = counted()
    return ProcessorTime(_own_seconds() - own, _machine_seconds() - machine, spent)


class Split:
    """Where the processor time of our saves goes, while it is entered: the functions that move
    bytes are timed by the thread that runs them, and what is left is Python and the rest."""

    _PARTS = (
        ("copy", Arrays, "take"),
        ("copy", direct_file, "copy_bytes"),
        ("encode", Quantized, "_encode_rows"),
        ("digest", Digester, "update"),
        ("write", Disk, "write"),
        ("write", Disk, "sync"),
    )

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(("copy", "encode", "digest", "write"), 0.0)
        self._lock = threading.Lock()
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Split:
        for part, owner, name in self._PARTS:
            function = getattr(owner, name)
            self._before.append((owner, name, function))
            setattr(owner, name, self._timed(part, function))
        return self

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    self.seconds[part] += time.thread_time() - start

        return run

    def __exit__(self, *_: object) -> None:
        for owner, name, function in self._before:
            setattr(owner, name, function)


def copy_and_write(model: Model, place: Path) -> ProcessorTime:
    """The least that a save could take: every plane once through a buffer, past the page cache."""
    path = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=place))
    own, machine = _own_seconds(), _machine_seconds()
    disk = Disk()
    handle = disk.create(str(path / "planes"))
    disk.set_direct(handle, True)
    buffer = recycled(BUFFER_NBYTES)
    for plane in model.planes.values():
        flat = memoryview(plane.reshape(-1).view(np.uint8))
        for start in range(0, len(flat), BUFFER_NBYTES):
            part = flat[start : start + BUFFER_NBYTES]
            direct_file.copy_bytes(buffer[: len(part)], part)
            whole = -(-len(part) // BLOCK_NBYTES) * BLOCK_NBYTES
            disk.write(handle, buffer[:whole])
    disk.sync(handle)
    disk.close(handle)
    spent = ProcessorTime(_own_seconds() - own, _machine_seconds() - machine)
    shutil.rmtree(path)
    return spent


def _own_seconds() -> float:
    """User and system time of this process, of children that ended, and of those that live."""
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in ended) + _children_seconds()


def _children_seconds() -> float:
    parents, seconds = {}, {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(entry.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    below, found = {os.getpid()}, True
    while found:
        found = {pid for pid, parent in parents.items() if parent in below} - below
        below |= found
    return sum(seconds[pid] for pid in below - {os.getpid()})


def _machine_seconds() -> float:
    user, nice, system, _, _, interrupts, softly, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + interrupts + softly) / os.sysconf("SC_CLK_TCK")
