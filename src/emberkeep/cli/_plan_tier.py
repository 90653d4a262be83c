"""`emberkeep plan --tier`: rows in memory against rows in files."""

from __future__ import annotations

from datetime import timedelta

from emberkeep.cli._repository import emit, print_json, print_table
from emberkeep.config import size
from emberkeep.errors import ConfigError
from emberkeep.planning.advisor import time_text
from emberkeep.planning.tier_costs import (
    TierOption,
    TierPlan,
    TierQuestion,
    plan_tier,
    read_machine,
    read_skew,
)


def answer(
    *, duration: timedelta, step: timedelta | None, table_nbytes: int | None,
    row_nbytes: int | None, skew: str | None, lookups: int | None, cache: str | None,
    memory_machine: str | None, tier_machine: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Prints what both ways cost."""
    needed = {
        "--table-gb": table_nbytes, "--row-bytes": row_nbytes, "--skew": skew,
        "--lookups": lookups, "--step-time": step, "--memory-machine": memory_machine,
        "--tier-machine": tier_machine,
    }  # fmt: skip
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ConfigError(f"--tier also needs {', '.join(missing)}")
    assert table_nbytes is not None
    assert row_nbytes is not None
    assert skew is not None
    assert lookups is not None
    assert step is not None
    assert memory_machine is not None
    assert tier_machine is not None
    try:
        cache_nbytes = None if cache is None else size(cache)
    except ValueError:
        raise ConfigError(f"--cache {cache!r} is no size: write 48GB") from None
    plan = plan_tier(
        TierQuestion(
            table_nbytes=table_nbytes,
            row_nbytes=row_nbytes,
            skew=read_skew(skew),
            lookups=lookups,
            step=step,
            duration=duration,
            memory_machine=read_machine("--memory-machine", memory_machine),
            tier_machine=read_machine("--tier-machine", tier_machine),
            cache_nbytes=cache_nbytes,
        )
    )
    if as_json:
        print_json(plan.to_dict())
    else:
        _print(plan)


def _print(plan: TierPlan) -> None:
    asked = plan.question
    emit(
        f"{asked.table_nbytes / 1e9:,.0f} GB in {asked.rows:,} rows, skew {asked.skew}, "
        f"{asked.lookups:,} lookups a batch, {time_text(asked.duration)} with all of them in memory"
    )
    columns = ["", "memory", "tier"]
    both = (plan.memory, plan.tier)
    machines = (asked.memory_machine, asked.tier_machine)
    print_table(
        columns,
        [
            ("machines", *(option.machines for option in both)),
            ("memory of each", *(f"{m.memory_nbytes / 1e9:,.0f} GB" for m in machines)),
            ("disk of each", "", f"{asked.tier_machine.disk_nbytes / 1e9:,.0f} GB"),
            *_of_a_tier(plan.tier),
            ("hours", *(f"{option.hours:,.2f}" for option in both)),
            ("price of an hour", *(f"{option.price_per_hour:,.2f}" for option in both)),
            ("price of the job", *(f"{option.price:,.2f}" for option in both)),
        ],
        right=columns[1:],
    )
    emit(f"\nrecommended: {plan.recommended}\n{plan.reason}")
    assumed = asked.assumed
    emit(
        f"assumed: {assumed.usable_memory:.0%} of memory is usable, files take "
        f"{assumed.file_space:g} times the rows, reads hide behind {assumed.hidden:.0%} of a step"
    )


def _of_a_tier(tier: TierOption) -> list[tuple[str, str, str]]:
    assert tier.cache_nbytes is not None
    assert tier.hit_rate is not None
    assert tier.written_nbytes_per_day is not None
    return [
        ("cache of all", "", f"{tier.cache_nbytes / 1e9:,.3g} GB"),
        ("hit rate", "", f"{tier.hit_rate:.2%}"),
        ("reads a batch", "", f"{tier.reads_per_batch:,.0f} in {tier.read_ms_per_batch:.1f} ms"),
        ("slower by", "", f"{tier.slowdown:.1%}"),
        ("written a day", "", f"{tier.written_nbytes_per_day / 1e12:,.2f} TB or more"),
    ]
