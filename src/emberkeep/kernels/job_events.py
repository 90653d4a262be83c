"""Jobs that are struck by failures, event by event: what happens, and no formula of what should."""

from __future__ import annotations

import numpy as np

from emberkeep._types import F64, I64
from emberkeep.kernels._jit import kernel

FULL, PARTIAL, PARITY = 0, 1, 2

# Columns of what a job came to; times are in the unit of what was given.
WALL, SAVING, RESTARTING, AGAIN, PLS, FULL_RECOVERIES, RECOVERIES, VERSIONS = range(8)
COLUMNS = 8


@kernel
def run_jobs(
    times_JF: F64, counts_JF: I64, firsts_JF: I64, mode: int, duration: float, shards: int,
    interval: float, save: float, rounds: int, prioritised_save: float, restart: float,
    most_pls: float, least_interval: float, together: int, speed: float, spare: int,
    stall: float, rebuild: float, rebuild_speed: float, out_JC: F64,
) -> int:  # fmt: skip
    """Runs each job from its start to its end; returns how many had not enough failures drawn.

    Failure f of job j strikes at `times_JF[j, f]`, wherever the job is then, and takes
    `counts_JF[j, f]` shards from `firsts_JF[j, f]` on. A version is due after `interval` of work;
    partial recovery also takes one when the loss of `together` shards would exceed `most_pls`, not
    sooner than `least_interval` after the last. With parity up to `spare` shards may be lost at
    once: training stands still for `stall`, then goes on at `rebuild_speed` for `rebuild`.
    """
    unfinished = 0
    recovered = np.zeros(shards)
    recovered_saved = np.zeros(shards)
    for j in range(times_JF.shape[0]):
        now = work = saved = cut = 0.0
        pls = pls_saved = saving = restarting = worked = 0.0
        fulls = recoveries = versions = done_rounds = f = 0
        lost, rebuilt_at = 0, 0.0
        recovered[:] = 0.0
        recovered_saved[:] = 0.0
        while work < duration:
            if f >= times_JF.shape[1]:
                unfinished += 1
                break
            # Work until a version is due, a rebuild ends, a failure strikes, or the job ends.
            due = cut + interval
            at_risk = np.inf
            if mode == PARTIAL and most_pls < 1e9:
                at_risk = saved + (most_pls - pls) * duration * shards / together
                at_risk = max(at_risk, cut + least_interval)
            whole_due = min(due, at_risk)
            next_due = whole_due
            if rounds > 1 and done_rounds < rounds - 1:
                next_due = min(next_due, cut + interval * (done_rounds + 1) / rounds)
            until = max(work, min(next_due, duration))
            rate = speed
            if lost > 0:
                rate = speed * rebuild_speed
            end = now + (until - work) / rate
            if lost > 0 and rebuilt_at < end and rebuilt_at < times_JF[j, f]:
                done = max(0.0, rebuilt_at - now) * rate
                work += done
                worked += done
                now = max(now, rebuilt_at)
                lost = 0
                continue
            struck = times_JF[j, f] < end
            if struck:
                done = max(0.0, times_JF[j, f] - now) * rate
                work += done
                worked += done
            else:
                worked += until - work
                work = until
                now = end
                if work >= duration:
                    break
                takes = save if work >= whole_due else prioritised_save
                if times_JF[j, f] < now + takes:
                    # The version is void, and due again when the job goes on.
                    saving += max(0.0, times_JF[j, f] - now)
                    struck = True
                else:
                    now += takes
                    saving += takes
                    versions += 1
                    if work >= whole_due:
                        saved = work
                        cut = work
                        done_rounds = 0
                        pls_saved = pls
                        recovered_saved[:] = recovered
                    else:
                        done_rounds += 1
            if not struck:
                continue
            # One failure after another, until a recovery ends before the next strikes.
            while True:
                now = max(now, times_JF[j, f])
                count, first = counts_JF[j, f], firsts_JF[j, f]
                f += 1
                recoveries += 1
                takes = restart
                back = mode == FULL
                if mode == PARITY:
                    lost += count
                    back = lost > spare
                    takes = stall
                elif mode == PARTIAL:
                    loss = 0.0
                    for i in range(count):
                        since = max(saved, recovered[(first + i) % shards])
                        loss += max(0.0, work - since) / (duration * shards)
                    back = pls + loss > most_pls or count >= shards
                    if not back:
                        pls += loss
                        for i in range(count):
                            recovered[(first + i) % shards] = work
                if back:
                    fulls += 1
                    work = saved
                    cut = saved
                    done_rounds = 0
                    pls = pls_saved
                    recovered[:] = recovered_saved
                    lost = 0
                    takes = restart
                if f < times_JF.shape[1] and times_JF[j, f] < now + takes:
                    restarting += max(0.0, times_JF[j, f] - now)
                    continue
                restarting += takes
                now += takes
                rebuilt_at = now + rebuild
                break
        out_JC[j, 0] = now
        out_JC[j, 1] = saving
        out_JC[j, 2] = restarting
        out_JC[j, 3] = worked - duration
        out_JC[j, 4] = pls
        out_JC[j, 5] = fulls
        out_JC[j, 6] = recoveries
        out_JC[j, 7] = versions
    return unfinished
