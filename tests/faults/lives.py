"""Many short lives of training processes, forked from one that has loaded everything already.

Loading torch and the kernels takes seconds, a life of a tiny run a fraction of one. `Nursery`
asks `python -m tests.faults.lives` (see `tests.loaded`) for a real process, a fork, for each; a
life ends by itself or by SIGKILL, which it sends itself at the moment that it was given.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.loaded import Foreman, Questions, serve


class Nursery:
    """Starts lives and tells how they end."""

    def __init__(self) -> None:
        self._foreman = Foreman(
            "tests.faults.lives", EMBERKEEP_THREADS="2", OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        )  # fmt: skip

    def _ask(self, **question: Any) -> int:
        return int(self._foreman.ask(**question))

    def start(
        self, what: str, *arguments: str, log: Path, end: dict[str, Any] | None = None,
        **environment: str,
    ) -> int:  # fmt: skip
        """Forks a life that calls `what` of this module with the arguments; returns its pid."""
        return self._ask(
            what=what, arguments=arguments, log=str(log), end=end or {}, environment=environment
        )

    def wait(self, pid: int) -> int:
        """The exit code, or minus the signal that ended it."""
        return self._ask(wait=pid)

    def wait_until_stopped(self, pid: int) -> None:
        """Returns when the life has stopped, as `sigstop_at_step` has it do."""
        assert self._ask(stopped=pid) == -signal.SIGSTOP

    def live(
        self, what: str, *arguments: str, log: Path, end: dict[str, Any] | None = None,
        **environment: str,
    ) -> int:  # fmt: skip
        return self.wait(self.start(what, *arguments, log=log, end=end, **environment))

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._foreman.close()


# -- ends ----------------------------------------------------------------------------------------


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_at_disk_call(number: int) -> None:
    """SIGKILL in place of the n-th system call of the store; a write gets half of its bytes out."""
    from emberkeep.blobs.system_disk import Disk

    lock, left = threading.Lock(), [number]

    def counted(name: str, real: Any) -> Any:
        def call(disk: Disk, *given: Any) -> Any:
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    if name == "write":
                        real(disk, given[0], given[1][: len(given[1]) // 2])
                    _die()
            return real(disk, *given)

        return call

    for name in (
        "create",
        "write",
        "sync",
        "close",
        "rename",
        "link",
        "unlink",
        "make_directory",
        "write_at",
        "allocate",
    ):
        setattr(Disk, name, counted(name, getattr(Disk, name)))


def end_at_step(number: int, *, before: bool, by: int = signal.SIGKILL) -> None:
    """A signal right before or after the n-th step of any optimizer."""
    from torch.optim import optimizer

    left = [number]
    if by == signal.SIGINT:  # which a process in the background of a shell inherits as ignored
        signal.signal(by, signal.default_int_handler)

    def count(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(by)

    register = (
        optimizer.register_optimizer_step_pre_hook
        if before
        else optimizer.register_optimizer_step_post_hook
    )
    register(count)


def end_after(seconds: float) -> None:
    timer = threading.Timer(seconds, _die)
    timer.daemon = True
    timer.start()


ENDS: dict[str, Callable[[Any], None]] = {
    "disk_call": end_at_disk_call,
    "before_step": lambda number: end_at_step(number, before=True),
    "after_step": lambda number: end_at_step(number, before=False),
    "sigterm_at_step": lambda number: end_at_step(number, before=False, by=signal.SIGTERM),
    "sigint_at_step": lambda number: end_at_step(number, before=False, by=signal.SIGINT),
    "sigstop_at_step": lambda number: end_at_step(number, before=False, by=signal.SIGSTOP),
    "seconds": end_after,
}

# -- what lives do -------------------------------------------------------------------------------


def train(*arguments: str) -> None:
    """`emberkeep train`."""
    from emberkeep.cli import main

    sys.argv = ["emberkeep", "train", *arguments]
    main()


def _mean_of_ranks(given: Any) -> Any:
    """What DDP does with a gradient, without torch's all-reduce of sparse tensors over gloo: in
    torch 2.13 that one damages the heap every few thousand calls (docs/keeper.md). Every rank
    has equally many samples of one id, so that the gradients to gather are of one size.
    """
    import torch
    from torch import distributed

    world = distributed.get_world_size()
    mean = torch.futures.Future()
    if given.is_sparse:
        rows, values = given._indices(), given._values()
        of_all = [[torch.empty_like(part) for _ in range(world)] for part in (rows, values)]
        distributed.all_gather(of_all[0], rows)
        distributed.all_gather(of_all[1], values)
        both = torch.sparse_coo_tensor(
            torch.cat(of_all[0], 1), torch.cat(of_all[1]) / world, given.shape
        )
        mean.set_result(both.coalesce())
    else:
        distributed.all_reduce(given)
        mean.set_result(given / world)
    return mean


def plain(
    path: str, rank: str = "0", world: str = "1", meeting: str = "", every: str = "3 steps"
) -> None:
    """A loop over plain torch modules with a keeper; prints a digest of all state at its end."""
    import torch
    import xxhash
    from torch import nn

    import emberkeep as ek
    from emberkeep.checkpoint import SaveSettings
    from emberkeep.data import Reader, Synthetic
    from emberkeep.keeper.plain_state import pack

    if int(world) > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world)
        )
    torch.manual_seed(int(rank))
    source = Synthetic(samples=640, rows_total=300)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(7)
            self.tables = nn.ModuleDict(
                {
                    feature: nn.EmbeddingBag(rows, 4, sparse=True)
                    for feature, rows in list(source.rows.items())[:8]
                }
            )
            self.drop = nn.Dropout(0.1)
            self.out = nn.Linear(32, 1)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.1, generator=generator)

        def forward(self, ids: dict[str, Any]) -> torch.Tensor:
            vectors = [bag(torch.from_numpy(ids[f])[:, None]) for f, bag in self.tables.items()]
            return self.out(self.drop(torch.cat(vectors, 1))).squeeze(1)

    model = Model()
    optimizers = [
        torch.optim.SparseAdam(model.tables.parameters(), lr=0.05),
        torch.optim.Adam(model.out.parameters(), lr=0.01),
    ]
    network: nn.Module = model
    if int(world) > 1:
        network = nn.parallel.DistributedDataParallel(model)
        network.register_comm_hook(None, lambda _, bucket: _mean_of_ranks(bucket.buffer()))
    reader = Reader(source, batch_size=16 // int(world), rank=int(rank), world=int(world))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], 40)
    criterion = nn.BCEWithLogitsLoss()
    with ek.Keeper(
        path,
        network,
        optimizers,
        reader=reader,
        strategy=ek.incremental(every=every, layout="consecutive", keep=2),
        settings=SaveSettings(grace=timedelta(0)),  # gc at every save
        state={"rate": scheduler},
    ) as keeper:
        keeper.resume()
        for batch in reader:
            loss = criterion(network(batch.ids), torch.from_numpy(batch.labels))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            keeper.step()
    digest = xxhash.xxh3_128()
    state = pack([model.state_dict(), *[optimizer.state_dict() for optimizer in optimizers]])
    digest.update(repr(state.plain).encode())
    for name, tensor in state.tensors.items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    print(json.dumps({"digest": digest.hexdigest(), "steps": keeper.steps}))


def tiered(path: str) -> None:
    """A training loop over a tier that keeps itself; prints a digest of all state at its end."""
    import torch
    from torch import nn

    import emberkeep as ek
    from emberkeep.data import Reader, Synthetic
    from emberkeep.models import DLRM, DLRMShape
    from emberkeep.tiers import durable_open
    from emberkeep.train.loop import digest

    durable_open.SEGMENT_NBYTES = 16384
    torch.manual_seed(0)
    source = Synthetic(samples=480, rows_total=900)
    tier = ek.Tier(path, memory=500 * 96)
    tables = [ek.Table(name, rows=rows, dim=4, tier=tier) for name, rows in source.rows.items()]
    bags = ek.EmbeddingBags(tables, optimizer=ek.Adagrad(lr=0.05), cluster=ek.local(shards=2))
    shape = DLRMShape(bottom=(8, 4), top=(8, 1))
    network = DLRM(bags, shape)
    dense = [*network.bottom.parameters(), *network.top.parameters()]
    optimizers = [bags.optimizer, torch.optim.Adam(dense, lr=0.01)]
    criterion = nn.BCEWithLogitsLoss()
    with Reader(source, batch_size=16) as reader:
        with ek.TierKeeper(network, optimizers, reader=reader, every="3 steps") as keeper:
            keeper.resume()
            for batch in reader:
                ids = {name: torch.from_numpy(given) for name, given in batch.ids.items()}
                coming = reader.peek()
                if coming is not None:
                    bags.prefetch({n: torch.from_numpy(g) for n, g in coming.ids.items()})
                out = network(torch.from_numpy(batch.dense), ids)
                criterion(out, torch.from_numpy(batch.labels)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                keeper.step()
        print(
            json.dumps(
                {
                    "digest": digest(
                        {t.name: bags.cluster.digest(t.name) for t in bags.tables}, network
                    ),
                    "steps": keeper.steps,
                }
            )
        )


def call(function: str, *arguments: str) -> None:
    """A function of any module, named as `module:function`."""
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)


# -- the parent ----------------------------------------------------------------------------------


def _be_born(question: dict[str, Any]) -> None:
    """The rest of a life, in the child."""
    code = 1
    try:
        log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(question["environment"])
        for kind, moment in question["end"].items():
            ENDS[kind](moment)
        globals()[question["what"]](*question["arguments"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _load() -> None:
    for name in ("torch.distributed", "emberkeep.cli.train", "emberkeep.train.loop"):
        importlib.import_module(name)
    importlib.import_module("emberkeep.train.train_warmup").warm_up()
    for rows in (300, 400, 900):  # what samples are drawn from is computed once
        importlib.import_module("emberkeep.data").Synthetic(samples=1, rows_total=rows).batch(0, 1)
    # What reads arguments is loaded when the first come.
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        train("--demo", "--set", "run.batch_size=0")


def _bear(questions: Questions) -> None:
    for question in questions:
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            questions.answer(os.waitstatus_to_exitcode(status))
            continue
        if "stopped" in question:
            _, status = os.waitpid(question["stopped"], os.WUNTRACED)
            questions.answer(-os.WSTOPSIG(status) if os.WIFSTOPPED(status) else 0)
            continue
        pid = questions.fork()
        if pid == 0:
            _be_born(question)
        questions.answer(pid)


if __name__ == "__main__":
    _path = sys.argv[1]
    _load()
    serve(_path, _bear)
