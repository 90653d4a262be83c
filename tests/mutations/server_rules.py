"""The rules of servers, parity and workers, each broken in the smallest way.

`S` are the rules of servers and parity, `W` those of workers, by their numbers. They were written
down before anything was run on them; `simulated.py` says which of them the simulator notices,
within how many seeds. A simulated cluster has no machines that several shards share (S9), no
signals (S13), no bodies of any length (S14) and no reader of samples (W3): those name a default
test in place of the simulator, and `run.py` tries them.
"""

from __future__ import annotations

from tests.mutations.rules import Mutation

EPOCH = "server/epoch.py"
PUSHES = "server/pushes.py"
STREAMS = "server/parity_streams.py"
HOST = "erasure/host.py"
REBUILDER = "erasure/rebuilder.py"
CLIENT = "cluster/remote/flight_cluster.py"
CLUSTER = "cluster/remote/remote_cluster.py"
SHARD = "cluster/remote/remote_shard.py"
REMOTE_PARITY = "cluster/remote/remote_parity.py"
SIMULATOR = "test_simulator.py"

SERVER_MUTATIONS = (
    # -- servers and parity ------------------------------------------------------------------------
    Mutation(
        "S1-epoch", "a request of another epoch is answered", EPOCH,
        "        if epoch != self.number:\n", "        if epoch < 0:\n", SIMULATOR,
    ),
    Mutation(
        "S1-lease", "a server that has not heard of its coordinator goes on", EPOCH,
        "        return self.left or self.silent_seconds > self.lease_seconds\n",
        "        return self.left\n", SIMULATOR,
    ),
    Mutation(
        "S1-renewal", "a renewal that is read late renews the lease", EPOCH,
        "        self.heard = max(self.heard, min(since, self.clock.monotonic()))\n",
        "        self.heard = self.clock.monotonic()\n", SIMULATOR,
    ),
    Mutation(
        "S1-empty", "a server serves before it was given its rows", EPOCH,
        '        if self.shard.state != "serving":\n            raise ServerError(f"shard',
        '        if self.shard.state == "lost":\n            raise ServerError(f"shard', SIMULATOR,
    ),
    Mutation(
        "S1-seal", "hosts do not seal the stream of a lost shard", HOST,
        "            self._streams[source].sealed = True\n", "", SIMULATOR,
    ),
    Mutation(
        "S2-ledger", "a push that was applied is applied again", PUSHES,
        "        return last is not None and number <= last\n", "        return False\n",
        SIMULATOR,
    ),
    Mutation(
        "S2-parity", "the ledger is not brought back from parity", EPOCH,
        "                self._ledger.note(int(worker, 16), number)\n", "                pass\n",
        SIMULATOR,
    ),
    Mutation(
        "S2-round", "a worker keeps its numbers after a push was given up", CLIENT,
        "        self._number = (self._number // _ROUND + 1) * _ROUND\n"
        "        self._incarnation = secrets.randbits(63)\n",
        "        pass\n", SIMULATOR,
    ),
    Mutation(
        "S3-settle", "a push is acknowledged before hosts hold it", STREAMS,
        "        return self._await(lambda: self._source.settled >= number or not "
        "self._source.hosts)\n",
        "        return True\n", SIMULATOR,
    ),
    Mutation(
        "S3-roll", "hosts do not undo what others do not hold", HOST,
        "            while _newest(stream) > number:\n",
        "            while False:\n", SIMULATOR,
    ),
    Mutation(
        "S3-replay", "pushes that were rolled back are not sent again", CLIENT,
        "            needed = index in sent.missing or undone\n",
        "            needed = index in sent.missing\n", SIMULATOR,
    ),
    Mutation(
        "S3-gap", "a host takes a message that leaves a gap", HOST,
        "        if message.number != stream.last + 1:\n", "        if message.number < 0:\n",
        SIMULATOR,
    ),
    Mutation(
        "S4-flight", "a decode does not follow differences that are in flight", HOST,
        "            if follow and self._decodes:\n", "            if False:\n", SIMULATOR,
    ),
    Mutation(
        "S4-discard", "a decode that began before a loss is finished", REBUILDER,
        "                member.host.drop()\n                for shard in lost:\n",
        "                for shard in lost:\n", SIMULATOR,
    ),
    Mutation(
        "S5-complete", "an empty host counts as whole", REMOTE_PARITY,
        "            return self._protect(index, (number, point), lost=True, complete=False)\n",
        "            return self._protect(index, (number, point), lost=True, complete=True)\n",
        SIMULATOR,
    ),
    Mutation(
        "S5-watermark", "differences beyond what a member has filled are added", HOST,
        "                    if filled is not None:\n", "                    if False:\n",
        SIMULATOR,
    ),
    Mutation(
        "S6-refill", "parity of rows that came from a version is not filled again", REBUILDER,
        "                        self.members[host].host.refill(shard)\n",
        "                        pass\n", SIMULATOR,
    ),
    Mutation(
        "S7", "more losses than parity can bear are borne", REBUILDER,
        "            if len(unknown) > len(self._parities(group, standings)):\n",
        "            if len(unknown) > 100:\n", SIMULATOR,
    ),
    Mutation(
        "S8", "a replacement serves before it knows which rows it had", REMOTE_PARITY,
        "        self.rebuilder.recover_marks(done)\n", "", SIMULATOR,
    ),
    Mutation(
        "S10-life", "another server at the address is taken for the one before", SHARD,
        '            same = status["life"] == self.life and status["epoch"] == self.epoch\n'
        '            if not same or status["draining"] or status["state"] != "serving":\n'
        "                self.disconnect()\n                return False\n",
        '            if status["draining"] or status["state"] != "serving":\n'
        "                self.disconnect()\n                return False\n", SIMULATOR,
    ),
    Mutation(
        "S10-rollback", "of a model that goes back, a server returns with what it had", CLUSTER,
        "        # All or none: of a model that goes back, no server may return with what it had.\n"
        "        self._give_up(self._named(shards))\n",
        "", SIMULATOR,
    ),
    Mutation(
        "S10-sealed", "a server returns whose streams are sealed", CLUSTER,
        "                self._give_up(lost)\n                try:\n", "                try:\n",
        SIMULATOR,
    ),
    Mutation(
        "S10-resend", "a server that returns does not get what it may have missed", CLIENT,
        "            needed = index in sent.missing or undone\n",
        "            needed = undone\n", SIMULATOR,
    ),
    Mutation(
        "S11", "a push that is given up takes the list of unsettled ones with it", CLIENT,
        "        # What has that number must not be taken for the next push.\n",
        "        self._unsettled.clear()\n", SIMULATOR,
    ),
    Mutation(
        "S12", "stripes of a host that holds nothing count as protected", STREAMS,
        "                self._leave_out(host)\n", "", SIMULATOR,
    ),
    Mutation(
        "S9", "a node gets as many shards of a stripe as there are", "cluster/spread.py",
        "    least = -(-shards // parity.r)\n", "    least = 1\n", "unit/cluster/test_spread.py",
    ),
    Mutation(
        "S13", "a server ends at the first signal, while its run needs it", "server/server_end.py",
        "        if self._asked.is_set():\n            self._now.set()\n",
        "        self._now.set()\n", "faults/test_servers_signalled.py",
    ),
    Mutation(
        "S14", "a body is read of a client that has shown no certificate",
        "server/flight_server.py", '{"verify_client": True, ', '{"verify_client": False, ',
        "integration/test_strangers.py",
    ),
    Mutation(
        "S15", "what a trainer had frozen when it died stays frozen", "server/shard_service.py",
        "        self._cancelled.set()\n        for snapshot in self._snapshots:\n"
        "            snapshot.close(())\n        self._snapshots = ()\n",
        "        self._cancelled.set()\n", SIMULATOR,
    ),
    # -- workers -----------------------------------------------------------------------------------
    Mutation(
        "W1-meet", "a shard does not wait for every rank", PUSHES,
        "            if len(step.parts) == self.world:\n", "            if step.parts:\n",
        SIMULATOR,
    ),
    Mutation(
        "W1-average", "the parts of ranks are summed, not averaged", PUSHES,
        "    share = np.float32(len(parts))\n", "    share = np.float32(1)\n", SIMULATOR,
    ),
    Mutation(
        "W1-once", "a step that was joined is applied by each rank that sends it again", EPOCH,
        "        if not together or request.number > self._applied_together:\n",
        "        if True:\n", SIMULATOR,
    ),
    Mutation(
        "W2-complete", "prefetched rows are not completed by the push before them", CLIENT,
        "                rows_UD[parts[s][1][part.positions]] = part.rows_UD\n",
        "                pass\n", SIMULATOR,
    ),
    Mutation(
        "W2-drop", "rows that were pulled ahead outlive a change of epoch", CLIENT,
        "    def _drop_ahead(self) -> None:\n        self._await_ahead()\n"
        "        self._ahead = None\n",
        "    def _drop_ahead(self) -> None:\n        self._await_ahead()\n", SIMULATOR,
    ),
    Mutation(
        "W3", "the state of a reader counts the samples of one rank", "data/reader.py",
        "samples=self._place.samples + passed", "samples=self._place.samples + len(batch)",
        "integration/test_workers.py",
    ),
)  # fmt: skip

SIMULATED = tuple(each for each in SERVER_MUTATIONS if each.noticed_by == SIMULATOR)
"""Those that a simulated cluster can meet."""
