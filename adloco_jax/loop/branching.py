"""The branch test: copies of a trainer take the same sequences in different batches side by side.

A branch round replaces a plain round. Branches from one point run batch B, 2B and 4B on the same
sequences, and so make S, S/2 and S/4 updates; each has the learning rate of its batch
(`inner.lr_on_growth`). The largest batch that loses nothing goes on, in the rounds to come too; the
work of the other branches counts. This measures the critical batch; the noise scale estimates it.

It is written here, but for the lines that call the engine (`adloco.branch_round`).

Source: "Critical Batch Size Revisited" (arXiv 2505.23971). Ours: the window is a round with its
outer step, and losses are compared on fixed held-out rows, so they need no smoothing.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adloco_jax.core.types import Ensemble, take
from adloco_jax.loop.control import Control, RoundPlan, Trainer, single_since
from adloco_jax.loop.growth import has_branches
from adloco_jax.settings import Settings

FACTORS = (1, 2, 4)  # of the batch


def branch(ensemble: Ensemble, trainer: int, count: int) -> Ensemble:
    """A stack of copies of one trainer, each with copies of all its workers.

    Args:
      ensemble: The stack.
      trainer: Its position.
      count: How many copies.

    Returns:
      An ensemble of `count` trainers; `core.take` of any one is `core.take` of the trainer.

    Raises:
      ValueError: If the trainer is not there.
    """
    one = take(ensemble, [trainer])
    copies = jax.tree.map(
        lambda leaf: leaf[np.tile(np.arange(len(leaf)), count)], one.replace(round=None)
    )
    owners = tuple(m for m in range(count) for _ in one.owners)
    return copies.replace(owners=owners, round=ensemble.round)


def choose_branch(losses: Sequence[float], *, epsilon: float) -> int:
    """The branch of the largest batch that loses nothing.

    Args:
      losses: By branch, batches ascending, nats/token; one that is not finite is lost.
      epsilon: How much higher than that of any smaller batch a loss may be.

    Returns:
      Its position; 0 if no loss is finite.

    Source: arXiv 2505.23971: the largest k with L_k <= L_j + epsilon for all j < k.
    """
    known = [loss if math.isfinite(loss) else math.inf for loss in losses]
    allowed = [
        place
        for place, loss in enumerate(known)
        if loss < math.inf and all(loss <= smaller + epsilon for smaller in known[:place])
    ]
    return max(allowed, default=0)


def branch_plans(
    control: Control, plans: Mapping[int, RoundPlan], settings: Settings
) -> list[RoundPlan]:
    """What each branch runs in the round to come, if it is a branch round.

    Args:
      control: Before the round.
      plans: Of the only trainer, as in a plain round.
      settings: The run's settings.

    Returns:
      Plans of the same sequences in batches of B, 2B, ... up to `batching.batch_cap`, the larger
      ones accumulated; empty for a plain round.
    """
    batching = settings.batching
    is_due = (control.round + 1) % batching.branch_every_rounds == 0
    if not (has_branches(settings) and is_due):
        return []
    (plan,) = plans.values()
    branches = [
        plan._replace(
            num_accum_steps=factor * plan.num_accum_steps, num_updates=plan.num_updates // factor
        )
        for factor in FACTORS
        if factor * _batch_size(plan) <= batching.batch_cap
    ]
    return branches if len(branches) > 1 else []


def branched(control: Control, plans: Sequence[RoundPlan]) -> Control:
    """The control of a stack of branches: trainers alike but for the batch.

    They share id, streams and cursors, and so read the same sequences.
    """
    (trainer,) = control.trainers

    def of(plan: RoundPlan) -> Trainer:
        return dataclasses.replace(copy.deepcopy(trainer), requested_batch_size=_batch_size(plan))

    return dataclasses.replace(
        control,
        trainers=[of(plan) for plan in plans],
        owners=[m for m in range(len(plans)) for _ in control.owners],
        streams=control.streams * len(plans),
        single_since=single_since(control),
    )


def kept(
    before: Control, after: Control, chosen: int, losses: Sequence[float]
) -> tuple[Control, dict]:
    """The control with the chosen branch as the only trainer; the totals count all of them.

    Args:
      before: Of the trainer, before the round.
      after: Of the stack of branches, after it.
      chosen: The branch that goes on.
      losses: By branch, nats/token.

    Returns:
      The new control, and the fields of the ledger line, `event` among them: what the other
      branches have cost is not in the round's own line.
    """
    branches = after.trainers
    others = [trainer for place, trainer in enumerate(branches) if place != chosen]
    costs = {  # all branches have the same sequences and synchronisations
        name: (getattr(after, f"{name}_total") - getattr(before, f"{name}_total"))
        * len(others)
        // len(branches)
        for name in ("tokens", "syncs", "bytes")
    }
    event = {
        "event": "branch",
        "round": after.round,
        "trainer": branches[chosen].id,
        "batch_sizes": [trainer.requested_batch_size for trainer in branches],
        "losses": list(losses),
        "chosen": branches[chosen].requested_batch_size,
        "updates": sum(trainer.updates - before.trainers[0].updates for trainer in others),
        **costs,
    }
    control = dataclasses.replace(
        after, trainers=[branches[chosen]], owners=before.owners, streams=before.streams
    )
    return control, event


def _is_off(c: Any) -> bool:
    return not has_branches(c)


RULES: dict[str, Callable[..., bool]] = {
    "branches are of one trainer; set ensemble.num_trainers=1": (
        lambda c: _is_off(c) or c.ensemble.num_trainers == 1
    ),
    "branches synchronise whole rounds; set outer.fragments=1 and outer.delay_updates=0": (
        lambda c: _is_off(c) or (c.outer.fragments == 1 and c.outer.delay_updates == 0)
    ),
    "branches make all, half and a quarter of a round's updates; set a multiple of 4": (
        lambda c: _is_off(c) or c.inner.steps_per_round % FACTORS[-1] == 0
    ),
    "branches count a round in updates; set inner.unit='updates'": (
        lambda c: _is_off(c) or c.inner.unit == "updates"
    ),
    "a batch must run as its branch did; set switch.mode='accumulate'": (
        lambda c: _is_off(c) or c.switch.mode == "accumulate"
    ),
    "each branch has its batch's learning rate; set inner.lr_on_growth='sqrt' (sgd: 'linear')": (
        lambda c: _is_off(c) or c.inner.lr_on_growth != "none"
    ),
    (
        "larger batches make a number of updates not known in advance; end the run, and its"
        " schedule, by num_tokens, or set inner.schedule='constant'"
    ): (lambda c: _is_off(c) or c.inner.schedule == "constant" or c.num_tokens),
}
"""What a config must satisfy; see `run.config`."""


def _batch_size(plan: RoundPlan) -> int:
    """Sequences per worker and update."""
    return plan.micro_batch_size * plan.num_accum_steps
