"""Trials of ideas for DiLoCo and the growing pool with Muon, declared before they ran.

    python -m studies.tricks [--only NAME] [--record studies/tricks.jsonl]

Each is one change of "DiLoCo, 110", "pool by hand, 220" or one worker, on seed 0, at 0.08 M
parameters, to 1.60. What wins by 3 % of the steps there runs on seeds 6 and 7; the median decides.
The code of what loses goes; its record stays.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from adloco_jax import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from adloco_jax.cli.compare import execute
from studies import methods, tables, track


def two_timescales(**given) -> optax.GradientTransformation:
    """Muon of a mix of two momenta, 0.95 and 0.99 (modded-nanogpt's track 3, #339 and #340)."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros

    def update(grads, state, params=None):
        fast, slow = (
            jax.tree.map(lambda old, g, decay=decay: decay * old + (1 - decay) * g, moment, grads)
            for moment, decay in zip(state, (0.95, 0.99), strict=True)
        )
        return jax.tree.map(lambda f, s: 0.44 * f + 0.56 * s, fast, slow), (fast, slow)

    mixed = optax.GradientTransformation(init, update)
    labels = given["label_params"]

    def is_matrix(params):
        return jax.tree.map(lambda label: label.endswith("matrix"), labels(params))

    return optax.chain(
        optax.masked(mixed, is_matrix), INNER_OPTIMIZERS["muon"](**given | {"beta1": 0.0})
    )


def two_timescales_rest(**given) -> optax.GradientTransformation:
    """The same; AdamW of the other parameters keeps its first moment."""
    matrices = two_timescales(**given)
    plain = INNER_OPTIMIZERS["muon"](**given)
    labels = given["label_params"]

    def label(params):
        return jax.tree.map(lambda label: "m" if label.endswith("matrix") else "r", labels(params))

    def init(params):
        return matrices.init(params), plain.init(params)

    def update(grads, state, params=None):
        first, one = matrices.update(grads, state[0], params)
        second, two = plain.update(grads, state[1], params)
        chosen = jax.tree.map(
            lambda name, a, b: a if name == "m" else b, label(params), first, second
        )
        return chosen, (one, two)

    return optax.GradientTransformation(init, update)


def slower_at_first(factor: float, updates: int):
    """Muon with `factor` of the rate in the first updates: of one worker, before others join."""

    def make(**given) -> optax.GradientTransformation:
        rate = optax.scale_by_schedule(lambda count: jnp.where(count < updates, factor, 1.0))
        return optax.chain(INNER_OPTIMIZERS["muon"](**given), rate)

    return make


def momentum_at(change: int, kept: float):
    """Nesterov's momentum, multiplied by `kept` before the outer update of index `change`."""

    def make(*, momentum: float, **_) -> optax.GradientTransformation:
        inner = optax.trace(momentum, nesterov=True)

        def init(params):
            return jnp.zeros((), jnp.int32), inner.init(params)

        def update(updates, state, params=None):
            count, old = state
            factor = jnp.where(count == change, kept, 1.0)
            old = jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), old)
            updates, new = inner.update(updates, old, params)
            return jax.tree.map(jnp.negative, updates), (count + 1, new)

        return optax.GradientTransformation(init, update)

    return make


def trials() -> dict[str, methods.Changes]:
    """Return the trials, in the order of their worth."""
    from adloco_jax import ROUND_LENGTHS

    INNER_OPTIMIZERS["two_timescales"] = two_timescales_rest
    for factor in (0.5, 0.667):
        INNER_OPTIMIZERS[f"slower_{factor:g}"] = slower_at_first(factor, 220)
    for name, kept in (("zeroed", 0.0), ("kept", 1.0), ("filled", 2.0)):
        OUTER_OPTIMIZERS[f"momentum_{name}"] = momentum_at(8, kept)
    ROUND_LENGTHS["doubled"] = lambda *, updates, **_: 110 if updates < 880 else 220

    def diloco(**changes):
        return methods.shared(110, changes)

    lengthened = {
        "inner.round_length": "doubled",
        "inner.max_steps_per_round": 220,
        **methods.budget("small", 2200),
    }
    one = methods.averaged()["one worker: Muon"]
    return {
        "DiLoCo, two momenta: 0.95 and 0.99": diloco(**{"inner.tx": "two_timescales"}),
        "DiLoCo, beta2: 0.95": diloco(**{"inner.beta2": 0.95}),
        "DiLoCo, beta2: 0.99": diloco(**{"inner.beta2": 0.99}),
        "pool by hand, 220, rate by workers: root": methods.by_hand(
            220, 220, {"inner.tx": "slower_0.5"}
        ),
        "pool by hand, 220, rate by workers: 0.004": methods.by_hand(
            220, 220, {"inner.tx": "slower_0.667"}
        ),
        **{
            f"DiLoCo, 110 then 220: momentum {name}": methods.shared(
                110, lengthened, {"outer.tx": f"momentum_{name}"}
            )
            for name in ("kept", "zeroed", "filled")
        },
        **{
            f"one worker, wrapper: rounds of {length}, 0.5 and 0.5": {
                **one,
                **methods.steps(length),
                **{"outer.tx": "nesterov", "outer.learning_rate": 0.5, "outer.momentum": 0.5},
                **{"outer.skip_single": False, "outer.average": 0.0},
            }
            for length in (10, 30)
        },
        "one worker, no wrapper: average 0.5": one,
        "pool by hand, 220, two momenta: 0.95 and 0.99": methods.by_hand(
            220, 220, {"inner.tx": "two_timescales"}
        ),
    }


def main() -> None:
    """Make the missing runs, and print what each spent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("tricks.jsonl"))
    given = parser.parse_args()
    found = trials()
    made = track.compared("small", "stdlib", found, seeds=tuple(given.seeds), to=(1.65, 1.6))
    chosen = {n: c for n, c in found.items() if not given.only or n in given.only}
    made = dataclasses.replace(made, variants=chosen, baseline=next(iter(chosen)))
    execute(
        made,
        Path("runs/tricks"),
        on_end=lambda run, was_made: was_made and print(run.variant, run.seed, flush=True),
        command="python -m studies.tricks",
        results_file=given.record,
    )
    lines = list(track.results.read(given.record).values())
    for target in made.target_losses:
        tables.show(f"to {target:g}", tables.CHOICE, tables.chosen(lines, target))


if __name__ == "__main__":
    main()
