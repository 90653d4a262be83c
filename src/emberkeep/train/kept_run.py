"""How a training run is kept: where it stands, and whether it begins, goes on or is finished."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from emberkeep._types import Json
from emberkeep.blobs import open_store
from emberkeep.data import Reader
from emberkeep.errors import StateError
from emberkeep.keeper import Costs, Keeper, Recoveries
from emberkeep.keeper.dense import Stateful
from emberkeep.keeper.run_saver import version_number
from emberkeep.keeper.warm_start import WarmStart
from emberkeep.repository import Repository
from emberkeep.strategies import partial
from emberkeep.train.hooks import Hook
from emberkeep.train.run_config import RunConfig


class Progress:
    """Where a run stands."""

    def __init__(self, total: int) -> None:
        self.total = total
        """Steps that the whole run takes."""
        self.steps = 0
        self.samples = 0
        """Samples that this process has trained on."""
        self.losses: deque[float] = deque(maxlen=max(total // 10, 1))
        """Of the last tenth of all steps."""
        self.resumed_step: int | None = None
        self.costs: Costs | None = None
        self.recoveries: Recoveries | None = None

    def add(self, loss: float, samples: int) -> None:
        self.steps += 1
        self.samples += samples
        self.losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "losses": np.array(self.losses, np.float64)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        self.losses.clear()
        self.losses.extend(state_dict["losses"].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Begins to keep a run: from the newest version if there is one, unless it is to start over."""

    settings: RunConfig
    fresh: bool
    hooks: Sequence[Hook]

    def begin(
        self,
        network: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        reader: Reader,
        progress: Progress,
    ) -> Keeper:
        given, tier = self.settings.checkpoint, self.settings.tier
        state: dict[str, Stateful] = {"progress": progress}
        about: Json = {}
        restart = "--fresh starts it over"
        if tier.every is not None and not self.settings.two_levels:
            assert tier.path is not None
            state["settings"] = _Agreed(tier.path, self.settings)
            strategy = partial(every=tier.every)
            restart = f"remove {tier.path} to start over"
        else:
            assert given.path is not None
            about = {"settings": _decisive(self.settings)}
            for where in () if self.fresh else (given.path, given.mirror):
                if where is not None:
                    _check_settings(where, about["settings"])
            strategy = self.settings.strategy()
        keeper = Keeper(
            given.path,
            network,
            optimizers,
            reader=reader,
            strategy=strategy,
            state=state,
            about=about,
            on_event=self._tell,
            must_exist=given.must_exist or tier.must_exist,
            total_steps=progress.total,
            settings=given.saving(),
            mirror=given.mirror,
            mirror_every=given.mirror_every,
            metrics_port=given.metrics_port,
        )
        for hook in self.hooks:
            hook.on_begin(keeper.stop_after_step)
        if self.fresh:
            keeper.start_over()
            self._tell("started_over", {})
            return keeper
        kept = keeper.resume(
            source=given.start_from, partial=given.start_from is not None, map=given.map
        )
        if isinstance(kept, WarmStart):
            if reader.samples == 0:  # other data: the pass over it begins
                progress.load_state_dict({"steps": 0, "losses": np.empty(0)})
        elif kept is not None:
            progress.resumed_step = kept.step
            if progress.steps >= progress.total:
                details = {
                    "version": version_number(kept),
                    "step": kept.step,
                    "start_over": restart,
                }
                self._tell("finished", details)
        return keeper

    def _tell(self, event: str, details: dict[str, Any]) -> None:
        for hook in self.hooks:
            hook.on_event(event, details)


class _Agreed:
    """The settings of a run, as state that refuses to become another's."""

    def __init__(self, path: str, settings: RunConfig) -> None:
        self._path, self._document = path, _decisive(settings)

    def state_dict(self) -> Json:
        return self._document

    def load_state_dict(self, state_dict: Json) -> None:
        wrong = list(_differences("", state_dict, self._document))
        if wrong:
            raise StateError(
                f"{self._path} holds a run with other settings: {'; '.join(wrong)}; resume it with "
                "the settings that it had, remove it to start over, or set another tier.path"
            )


def _decisive(settings: RunConfig) -> Json:
    """The settings that decide what a run computes; where and how often it is saved, where its
    rows and shards are and which of them are made to fail does not."""
    document: Json = json.loads(json.dumps(settings.to_dict()))
    for section in ("checkpoint", "failures", "tier", "job"):
        del document[section]
    # Rows are the same bits wherever their shards are; how many ranks add them up is not the same.
    document["cluster"] = {key: document["cluster"][key] for key in ("shards", "workers")}
    return document


def _check_settings(path: str, present: Json) -> None:
    """Refuses to go on with other settings, before anything is opened for writing."""
    store = open_store(path)
    if not Repository.exists(store):
        return
    repository = Repository.open(store)
    newest = repository.newest_whole()
    if newest is None:
        return
    manifest = repository.manifest(newest)
    if "imported" in manifest.layout and "settings" not in manifest.user:
        return  # rows from elsewhere, which no run has gone on from yet
    saved = manifest.user.get("settings", {})
    wrong = list(_differences("", saved, present))
    if wrong:
        raise StateError(
            f"{path} holds a run with other settings: {'; '.join(wrong)}; resume it with the "
            "settings that it had, start over with --fresh, or set another checkpoint.path"
        )


def _differences(at: str, saved: Any, present: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(present, dict):
        for key in sorted({*saved, *present}):
            yield from _differences(f"{at}.{key}".lstrip("."), saved.get(key), present.get(key))
    elif saved != present:
        yield f"{at} was {saved!r}, is {present!r}"
