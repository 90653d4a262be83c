"""SIGKILL of servers with tiers, and of the trainer that coordinates them, at any moment: the run
goes on from the batch that was decided, and ends with the same bits.

Servers are killed by the test, and started again at their addresses, where they find their files;
trainers die as in `test_kill`. `EMBERKEEP_SEED` repeats a sequence of deaths.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.errors import ServerError, ShardLostError
from emberkeep.tables import Tier
from tests.faults.lives import Nursery
from tests.faults.test_kill import CONFIG, DYNAMIC, random_end, result_in, seed
from tests.integration.test_tiered_keeper import SHARDS as PARTIAL_SHARDS
from tests.integration.test_tiered_keeper import TABLES, OnServers, Run
from tests.servers import Farm, FarmLauncher

SHARDS = 2
ON_SERVERS = """
[cluster]
kind = "connect"
shards = {shards}
addresses = [{addresses}]
lease = "1s"
[tier]
every = "2 steps"
"""


class Servers:
    """Servers at addresses that stay; one that dies is started again there."""

    def __init__(self, farm: Farm, path: Path, memory: int = 60_000) -> None:
        self.farm, self.tier = farm, Tier(path, memory=memory)
        started = [farm.start(tier=self.tier) for _ in range(SHARDS)]
        self.pids = [pid for pid, _ in started]
        self.addresses = [address for _, address in started]
        self.killed = 0

    def kill(self, shard: int) -> None:
        self.farm.kill(self.pids[shard])
        port = int(self.addresses[shard].rpartition(":")[2])
        self.pids[shard], _ = self.farm.start(port=port, tier=self.tier)
        self.killed += 1

    @contextmanager
    def dying(self, at: Sequence[float], chance: random.Random) -> Iterator[None]:
        """While the body lasts, servers die: one or all of them, after so many seconds each."""
        over = threading.Event()
        killed = [chance.sample(range(SHARDS), chance.choice([1, 1, SHARDS])) for _ in at]

        def kill() -> None:
            for seconds, shards in zip(at, killed, strict=True):
                if over.wait(seconds):
                    return
                for shard in shards:
                    self.kill(shard)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            yield
        finally:
            over.set()
            killer.join()

    def end(self) -> None:
        for pid in self.pids:
            self.farm.kill(pid)


def config(where: Path, name: str, servers: Servers | None, **settings: str) -> str:
    path = where / f"{name}.toml"
    text = CONFIG.replace('every = "3 steps"', 'every = "9 steps"').format(
        path=where / name, optimizer="adam", layout="intermittent", **settings
    )
    if servers is None:
        text += f"[cluster]\nshards = {SHARDS}\n"
    else:
        addresses = ", ".join(f'"{address}"' for address in servers.addresses)
        text += ON_SERVERS.format(shards=SHARDS, addresses=addresses)
    path.write_text(text)
    return str(path)


def check(nursery: Nursery, farm: Farm, where: Path, kills: int, **settings: str) -> None:
    log = where / "whole.log"
    whole = config(where, "whole", None, **settings)
    assert nursery.live("train", whole, "--json", log=log) == 0, log.read_text()
    expected, chance, killed, runs = result_in(log), random.Random(seed()), 0, 0
    while killed < kills:
        runs += 1
        servers = Servers(farm, where / f"tier-{runs}")
        try:
            path = config(where, f"run-{runs}", servers, **settings)
            while True:
                end = random_end(chance) if killed < kills and chance.random() < 0.5 else {}
                times = [chance.uniform(0.1, 1.0)] * chance.choice([0, 1, 2])
                log = where / "life.log"
                with servers.dying(times if killed < kills else (), chance):
                    code = nursery.live("train", path, "--json", log=log, end=end)
                lost, servers.killed = servers.killed, 0
                killed += lost + (code == -signal.SIGKILL)
                if code == 0:
                    break
                # A loss while the run starts, or is evaluated, ends it: it is started again.
                gone = (ShardLostError.exit_code, ServerError.exit_code)
                ends = {-signal.SIGKILL, *(gone if lost else ())}
                assert code in ends, f"{end}: {log.read_text()}"
            assert result_in(log) == expected, f"run {runs} of seed {seed()}: {log.read_text()}"
        finally:
            servers.end()


class Recovering(Run):
    """Looks at each shard that has come back, before it is trained on."""

    at: dict[int, list[dict[str, str]]]
    """What each shard held when a step was done, unless one died before it was asked."""
    compared = 0

    def look(self) -> None:
        self.at[self.keeper.steps] = [self.digests(shard) for shard in range(PARTIAL_SHARDS)]

    def digests(self, shard: int) -> dict[str, str]:
        return {t.name: str(self.cluster.handles[shard].digest(t.name)) for t in TABLES}

    def hear(self, event: str, details: Any) -> None:
        if event == "recovered":
            (shard,) = details["shards"]
            (batch,) = {file["batch"] for file in self.cluster.handles[shard].tier_files()}
            assert details["scope"] == "partial"
            assert batch >= max(saved["step"] for saved in self.heard("saved"))
            if batch in self.at:
                assert self.digests(shard) == self.at[batch][shard], f"batch {batch}"
                self.compared += 1
            self.at = {step: held for step, held in self.at.items() if step >= batch}
        super().hear(event, details)


def check_partial(farm: Farm, where: Path, kills: int) -> None:
    """One server after the other dies, at any moment of training and of making batches durable:
    it alone goes back to the batch that was decided, while the others go on."""
    launcher = FarmLauncher(farm, PARTIAL_SHARDS, tier=Tier(where / "t", memory=40_000))
    strategy = ek.tiered(every=2, remote=10**6, recovery="partial")
    run = Recovering(OnServers(launcher), where / "r", strategy)
    run.at, chance = {}, random.Random(seed())
    run.keeper.resume()
    run.train(2)  # a batch is there
    run.look()
    for kill in range(1, kills + 1):
        after = chance.uniform(0.0, 0.1)
        killer = threading.Timer(after, launcher.kill, [chance.randrange(PARTIAL_SHARDS)])
        killer.start()
        while len(run.heard("recovered")) < kill:
            run.train(1, wait=False)
            with suppress(ShardLostError):  # which the next step makes good
                run.look()
        killer.join()
    assert run.compared
    run.end()
    launcher.end()


# Twenty together.


@pytest.mark.parametrize("tables", ["", DYNAMIC], ids=["fixed", "dynamic"])
def test_servers_and_trainer_are_killed(
    nursery: Nursery, farm: Farm, tmp_path: Path, tables: str
) -> None:
    check(nursery, farm, tmp_path, 7, tables=tables)


def test_servers_are_killed_and_come_back_alone(farm: Farm, tmp_path: Path) -> None:
    check_partial(farm, tmp_path, 6)


@pytest.mark.soak
@pytest.mark.parametrize("tables", ["", DYNAMIC], ids=["fixed", "dynamic"])
def test_they_are_killed_three_hundred_times(
    nursery: Nursery, farm: Farm, tmp_path: Path, tables: str
) -> None:
    check(nursery, farm, tmp_path, 150, tables=tables)


@pytest.mark.soak
def test_they_come_back_alone_a_hundred_times(farm: Farm, tmp_path: Path) -> None:
    check_partial(farm, tmp_path, 100)
