"""Progress of a training run on stderr: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from emberkeep.cli._shell import say
from emberkeep.train.hooks import Hook, Step

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_TITLES = {"embeddings": "training", "baseline": "without embeddings"}
_LINES_PER_PHASE = 10
# A shard that is silent is mentioned so often.
_SILENT_SECONDS = 4.0


def progress() -> Hook:
    """What fits where stderr goes."""
    return Bar() if sys.stderr.isatty() else Lines()


class _Rate:
    """Samples per second of the current phase, first step excepted: it may compile kernels."""

    def __init__(self) -> None:
        self._phase = ""
        self._since = 0.0
        self._before = 0

    def of(self, step: Step) -> float | None:
        if step.phase != self._phase:
            self._phase, self._since, self._before = step.phase, step.at, step.samples
            return None
        return (step.samples - self._before) / max(step.at - self._since, 1e-9)


def recovery_line(details: dict[str, Any]) -> str:
    """One recovery in one line."""
    named = _named(details)
    seconds = f"in {details['seconds']:.2f} s"
    if details["scope"] == "parity":
        return f"lost {named} after step {details['step']}; {details['reason']} {seconds}"
    source = "the tier" if details["version"] is None else f"version {details['version']}"
    if details["scope"] == "full":
        return (
            f"lost {named}; everything went back to {source}, step "
            f"{details['step']}, {seconds}: {details['repeated_steps']} steps are taken again "
            f"({details['reason']})"
        )
    return (
        f"lost {named} after step {details['step']}; recovered alone from {source} {seconds}: "
        f"PLS is now {details['pls']:.4g} ({details['reason']})"
    )


def resumed_line(details: dict[str, Any]) -> str:
    """Where a run goes on, in one line."""
    source = "the tier" if details["version"] is None else f"version {details['version']}"
    line = f"resumed from {source}, after step {details['step']}"
    twice = details.get("samples_applied_twice")
    if twice is None:
        return line
    return f"{line}, beside rows that servers kept: {twice:,} samples are applied to them twice"


def plan_line(details: dict[str, Any]) -> str:
    """What a run has decided for itself, in one line."""
    stored = "exact" if details["bits"] is None else f"{details['bits']} bits"
    return (
        f"planned after step {details['step']}: {details['scope']} recovery, a version every "
        f"{details['interval_seconds']:.3g} s, {details['layout']}, {stored}; {details['reason']}"
    )


def cluster_line(event: str, details: dict[str, Any]) -> str | None:
    """What happens to a cluster in one line; None for an event that is not its own."""
    after = f" after {details['seconds']:.0f} s" if "seconds" in details else ""
    if event == "silent":
        waiting = f"silent for {details['seconds']:.0f} s, waiting until {details['until']:.0f} s"
        return f"{_named(details)} has been {waiting}"
    if event == "unheard":
        return f"{_named(details)} has not answered{after}: a step that needs it waits"
    if event == "returned":
        return f"{_named(details)} answers again{after}, with its rows"
    if event == "lost":
        return f"{_named(details)} lost{after}, recovering"
    if event == "unprotected":
        return f"{_named(details)} not protected by parity: one more loss may cost rows"
    if event == "protected":
        return f"{_named(details)} protected by parity again{after}"
    return None


def _named(details: dict[str, Any]) -> str:
    """ "shard 1", "shards 1, 2"."""
    shards = details["shards"] if "shards" in details else [details["shard"]]
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"


class _Telling(Hook):
    """Says in one line where the run goes on."""

    def __init__(self) -> None:
        self._rate = _Rate()
        self._said_silent = -math.inf

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        if event == "resumed":
            if "source" in details:
                source = f"version {details['version']} of {details['source']}"
                rows = sum(details["rows"].values())
                say(f"started from {source}, after step {details['step']}: {rows:,} rows")
                for line in details["skipped"]:
                    say(f"not taken along: {line}")
                return
            say(resumed_line(details))
        elif event == "recovered":
            say(recovery_line(details))
        elif event == "planned":
            say(plan_line(details))
        elif event == "starting":
            servers = f"{details['servers']} servers and " if details["servers"] else ""
            say(f"starting {servers}{details['workers']} workers on Ray")
        elif event == "restarting":
            self._rate = _Rate()  # of the workers that are to come
            say(
                f"{details['reason']}; all workers are started again, attempt "
                f"{details['attempt']} of {details['attempts']}"
            )
        elif event == "calibrated":
            widths = details["tables"].values()
            bits = sorted(table["bits"] for table in widths if table["bits"] is not None)
            spread = " to ".join(dict.fromkeys(map(str, (*bits[:1], *bits[-1:])))) or "no"
            quantized = sum(table["optimizer"] for table in widths)
            say(
                f"calibrated: {len(bits)} of {len(widths)} tables get {spread} bits, optimizer "
                f"planes of {quantized} are quantized ({details['why']})"
            )
        elif event == "brought_from_mirror":
            say(f"the mirror has a newer version: step {details['step']} was copied from there")
        elif event == "bandwidth":
            seconds = details["shortest_interval_seconds"]
            say(
                f"at {details['most_mb_per_second']:g} MB/s a version of all rows, with "
                f"prioritised ones up to the next, takes about {seconds:,.1f} s: the shortest "
                "interval"
            )
        elif event == "finished":
            say(f"this training is finished: nothing is left to train; {details['start_over']}")
        elif (line := cluster_line(event, details)) is not None:
            now = time.monotonic()
            if event == "silent" and now - self._said_silent < _SILENT_SECONDS:
                return
            self._said_silent = now if event == "silent" else -math.inf
            say(line)


class Lines(_Telling):
    """Ten lines for each phase, each complete in itself."""

    def on_step(self, step: Step) -> None:
        rate = self._rate.of(step)
        tenths_now = step.number * _LINES_PER_PHASE // step.steps
        tenths_before = (step.number - 1) * _LINES_PER_PHASE // step.steps
        if tenths_now == tenths_before:
            return
        speed = f"{rate:,.0f} samples/s  " if rate is not None else ""
        print(
            f"{_TITLES[step.phase]}: step {step.number} of {step.steps}  "
            f"{step.samples:,} samples  {speed}loss {step.loss:.4f}",
            file=sys.stderr,
            flush=True,
        )


class Bar(_Telling):
    """One bar for each phase."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        super().__init__()
        self._task: TaskID | None = None
        self._phase = ""
        self._progress: Progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._progress.start()

    def on_step(self, step: Step) -> None:
        rate = self._rate.of(step)
        if self._task is None or step.phase != self._phase:
            self._phase = step.phase
            self._task = self._progress.add_task(
                _TITLES[step.phase], total=step.steps, rate="", loss=""
            )
        self._progress.update(
            self._task,
            completed=step.number,
            rate=f"{rate:,.0f} samples/s" if rate is not None else "",
            loss=f"loss {step.loss:.4f}",
        )

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._progress.stop()
