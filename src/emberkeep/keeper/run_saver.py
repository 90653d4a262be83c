"""What a keeper needs of what stores its run: a repository, or the tiers that hold the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

from emberkeep._types import Json
from emberkeep.checkpoint.recovery import Home
from emberkeep.checkpoint.save import Counters, Saving
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.cluster.base import PATIENCE, Cluster
from emberkeep.errors import RecoveryError, ShardLostError
from emberkeep.keeper.run_state import Captured
from emberkeep.repository import Manifest
from emberkeep.runtime.clock import Clock

# Between attempts of a first version: the first pause, and the longest.
_PAUSE_SECONDS = (0.05, 1.0)


class DurableStep(int):
    """The step that a tier comes back to; `step` is the number itself, as a manifest has it."""

    @property
    def step(self) -> int:
        return int(self)


Kept: TypeAlias = Manifest | DurableStep
Hear: TypeAlias = Callable[[str, Json], object]


def version_number(kept: Kept | None) -> int | None:
    """A tier has no versions, only the step that is durable."""
    return kept.version.number if isinstance(kept, Manifest) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A run whose rows are back; `passed_over` are the damaged versions that were newer."""

    kept: Kept
    counters: Json
    passed_over: tuple[int, ...] = ()


class RunSaver(Protocol):
    """Saves a run beside its training. Two saves never overlap, and one is whole or did not
    happen."""

    @property
    def url(self) -> str: ...

    @property
    def exact(self) -> bool:
        """Whether what regular saves hold is the state to the bit."""

    @property
    def busy(self) -> bool:
        """Whether a save that is due is left out, because one is under way."""

    @property
    def due_whole(self) -> bool: ...

    @property
    def whole(self) -> Kept | None:
        """The newest save that holds everything."""

    @property
    def committed_step(self) -> int | None:
        """The step of the last save of this process, once it is durable, if it is whole."""

    @property
    def restores(self) -> int:
        """How often the run was restored, whole or in part, by this process and others."""

    @property
    def lossy_restores(self) -> int:
        """Those that brought rounded rows back."""

    def follow(self, spec: VersionSpec) -> None:
        """What versions hold from the next one on."""

    def holds_run(self) -> bool:
        """Whether there is something to resume."""

    def cut(
        self, step: int, state: Captured | None, counters: Counters, *, whole: bool = True
    ) -> Saving[Any]: ...

    def finish(self, step: int, state: Captured | None, counters: Counters) -> Kept | None:
        """A last save, exact and durable."""

    def bring_back(
        self, version: int | str | None, *, fall_back: bool, fits: Callable[[Captured], object]
    ) -> Returned | None:
        """The rows as they were saved; `fits` refuses what does not before any row has changed."""

    def tag(self, name: str, version: int | str | None = None) -> Manifest:
        """Names a version, the newest unless another is given; the name moves."""

    def recover_shards(
        self, lost: Iterable[tuple[Home, Sequence[int]]], still: Callable[[], bool] | None = None
    ) -> Kept | None:
        """Brings the shards that one failure took back with what is saved of them; the others go
        on. `still` says whether that is still right once nobody can push to those before."""

    def kept_nbytes(self) -> int: ...

    def check(self) -> None:
        """Raises what went wrong in the background."""

    def make_room(self) -> None:
        """Returns when the next save may begin, or the process is being stopped."""

    def cancel(self) -> None:
        """Gives up the save under way, unless it is about to be durable."""

    def give_up(self) -> None:
        """The process ends at once: whatever is being written is given up, copies to a mirror
        too, and nobody waits for it."""

    def heed(self, stopping: Callable[[], object], grace: timedelta) -> None:
        """Once `stopping` holds, calls that wait for a save lift its limits or wait no longer, and
        the end of a run waits for a mirror for `grace` at most."""

    def hurry(self) -> None:
        """The process is being stopped: no limit of bandwidth holds from now on."""

    def leave(self, left: timedelta) -> None:
        """Uses what is `left` of the time for what may follow the last save."""

    def check_caller(self) -> None:
        """Raises `StateError` in a thread that saves, which would wait for itself."""

    def join(self, timeout: timedelta | None = None) -> bool: ...

    def join_unless_stopping(self) -> bool:
        """`join`, given up once the process is being stopped: whether no save is under way."""

    def learn_outcome(self) -> None:
        """Returns when it is known what became of every save, also of one under way and of one
        that was reported as failed."""

    def wait(self) -> Kept | None: ...

    def close(self) -> Kept | None: ...


def save_first(
    saver: RunSaver, clusters: Sequence[Cluster], cut: Callable[[], object], clock: Clock
) -> None:
    """A version of the very beginning, durable. Shards that are lost meanwhile were empty, and are
    replaced by empty ones, for as long as the clusters have patience: then it is `RecoveryError`.
    """
    fresh = all(
        cluster.digest(table.name).rows == 0  # counted where they live
        for cluster in clusters
        for table in cluster.tables
    )
    patience = max((cluster.patience for cluster in clusters), default=PATIENCE)
    deadline = clock.monotonic() + patience.total_seconds()
    pause, longest = _PAUSE_SECONDS
    while True:
        try:
            for cluster in clusters:
                lost = cluster.lost()
                if lost and fresh:
                    cluster.renew(*lost)
                    cluster.serve(*lost)
            cut()
            saver.wait()
            return
        except ShardLostError as error:
            if not fresh:
                raise
            if clock.monotonic() > deadline:
                named = ", ".join(map(str, error.shards))
                raise RecoveryError(
                    f"shards keep being lost before the first version is saved, for {patience} by "
                    f"now, the last time {named}: see why they end, then start the run again"
                ) from error
            for cluster in clusters:
                cluster.stop.look("shards that are lost again and again before the first version")
            clock.sleep(pause)
            pause = min(longest, 2 * pause)
            for cluster in clusters:
                cluster.await_silent()


def save_until(
    deadline: float, saver: RunSaver, step: int, state: Captured | None, counters: Counters,
    clock: Clock,
) -> int | None:  # fmt: skip
    """Saves this step before `deadline`, by `clock.monotonic`; the step that is saved by then.

    A save under way has half of that time: then it is given up for this one.
    """

    def left(share: float = 1.0) -> timedelta:
        return timedelta(seconds=max(0.0, deadline - clock.monotonic()) * share)

    if not saver.join(left(0.5)):
        saver.cancel()
    if not saver.join(left()):
        return None
    if saver.committed_step != step:
        saver.cut(step, state, counters)
        saver.join(left())
    return saver.committed_step
