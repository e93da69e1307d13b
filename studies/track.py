"""One track of methods: texts, sizes, seeds, target losses, and the rule by which settings win.

    python -m studies.track muon             print the rows of its record, and what is not made yet
    python -m studies.track muon --run                        make the runs that are missing, first
    python -m studies.track muon --run --record again.jsonl   repeat all rows, into another record
    python -m studies.track muon --run --only DiLoCo --record again.jsonl     repeat one

To add a method:

1. Write it as an entry of `muon` in studies/methods.py, "method: setting" with the settings that
   differ: `"mine: plain averaging": {**steps(STEPS), **budget("small", 2750), **MUON, **AVERAGE}`.
   If it needs code, add a function to one of the package's tables (docs/extend.md).
2. `python -m studies.track muon --run --only mine` trains it on five seeds, a minute each, and
   prints its row below those of the recorded methods. The tracks muon_prose and debian have it
   now, too.

A run is known by its name, its seed and its config, and what is in a record, studies/NAME.jsonl,
is not made again.

Rule of choice: the trials of a method are declared in a commit before they run, with Muon at most
ten of a baseline and sixteen of the pool, on seeds 0, 6 and 7 (one seed at 0.61 M parameters). The
trial whose median seed reaches the target with the fewest sequential steps wins; among trials
within 5 % of it, the one with the fewest synchronisations, then with the fewest tokens
(`python -m studies.tables choose`). Rows are of seeds that no choice has used. The target of a text
and size is the lowest loss, in steps of 0.02 nats per byte, that DiLoCo and data parallelism both
reach on seed 0. The pool is to need at most 0.9 of DiLoCo's sequential steps, 0.5 of its
synchronisations and 0.7 of its tokens, in medians.

Texts: Python's standard library; prose, 9.8 MB of C4 and film reviews as JSON lines in the folder
runs/prose; debian, 64 MB that two packages of Debian have (studies/texts.py).

- front, front_prose: rounds of several lengths, joins by the test and by hand, with the outer step
  that is best with Muon. They print ratios at equal cost, and rows of muon and muon_prose as the
  front's ends. Not all of their runs are made yet.
- muon, muon_prose: Muon and an average of rounds, at 0.08 M parameters.
- half_muon: the same at 0.61 M parameters.
- half_front: the front at 0.61 M parameters, to 1.32. Not all of its runs are made yet.
- debian: the same settings, not tuned again, on a third text. Runs end by the library's budgets; to
  1.76 DiLoCo needs about as many steps as on other texts.
- widths: short runs at three widths and rates, on the seeds of choices, to say how the best rate
  follows the width. Not all of its runs are made yet.
- microllama: the paper's comparison (arXiv 2508.18182, table A.2 and section 6.1; departures as in
  configs/microllama.py), for four GPUs of 80 GB; not run yet. The environment variables MICROLLAMA
  and C4 may name a local checkpoint and local files of text.

Records that no track names are only printed (studies/tables.py). Commit d3b65cfc repeats the trials
(average, half_muon_tuning, debian_tuning, front_tuning) and the rows with AdamW (small, prose,
half). moments has the front's rows with momentum averaged over workers (inner.state=mean), of
commit a3ae69b9. At commit 8250d13 `adloco compare studies/compare_*.py` repeats small_tuning,
again, order_tuning, shakespeare and barrier, and its studies/track.py half_tuning, prose_tuning and
order. Commit 8f5d4872 is the last that has `adloco compare` and `compare_quick`, the
published method against DiLoCo (studies/published.md).
"""

import argparse
import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from ml_collections import ConfigDict

from adloco_jax.config import default_config
from adloco_jax.configs import microllama
from adloco_jax.study.curves import read_run
from studies import methods, results, tables
from studies.cluster import Cluster
from studies.compare import Comparison, Trial, curve, execute, runs_of
from studies.methods import Changes

TEXTS = {
    "stdlib": "stdlib",
    "prose": "runs/prose",
    "debian": "runs/debian.jsonl",
}  # paths of JSON lines
# A front's ends, and its methods as they were tuned before, are rows of older records.
ENDS = {
    "front": "muon.jsonl",
    "front_prose": "muon_prose.jsonl",
    "half_front": "half_muon.jsonl",
}
EARLIER = {
    "one worker: Muon": "one worker: Muon",
    "data parallel: Muon": "data parallel: Muon",
    "DiLoCo: Muon": "earlier DiLoCo, 110: outer 0.8, 0.6",
    "growing pool: eta 1.6, Muon": "earlier pool by test, 220: eta 1.6",
    "growing pool, fewer tokens: eta 2.3, Muon": "earlier pool by test (2.3), 220: eta 2.3",
    "one worker: Muon, 0.004": "one worker: Muon",
    "data parallel: Muon, 0.01": "data parallel: Muon",
    "DiLoCo: Muon, 0.006": "earlier DiLoCo, 110: outer 0.8, 0.6",
    "growing pool: Muon, 0.006": "earlier pool by test, 220: eta 1.6",
}
TRIED = (0, 6, 7)  # the seeds of choices
FRESH, NEXT = (31, 32, 33, 34, 35), (41, 42, 43, 44, 45)


def get_base(size: str, text: str = "stdlib") -> ConfigDict:
    """Return the config of DiLoCo with four workers, in which methods change some settings.

    Args:
      size: "small" (75,600 parameters) or "half" (0.61 M).
      text: A name of `TEXTS`.
    """
    config, is_small = default_config(), size == "small"
    config.model.width = 48 if is_small else 128
    config.model.num_layers = 2 if is_small else 3
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_width = 128 if is_small else 344
    config.model.max_length = config.data.sequence_length = methods.LENGTH[size]
    if text != "stdlib":
        config.data.source, config.data.path = "jsonl", TEXTS[text]
    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = methods.WORKERS
    # Each method sets its own num_tokens and length of rounds.
    config.num_tokens = None
    config.inner.steps_per_round = 200
    config.inner.weight_decay = 0.0
    config.inner.learning_rate = 2e-3 if is_small else 1e-3
    config.update_from_flattened_dict(methods.batch(methods.BATCH))
    config.batching.test = "constant"
    config.merge.policy = "none"
    config.eval.num_sequences = 256
    config.batching.smoothing = 0.5  # a run of a few long rounds has few tests to average
    config.checkpoint.keep = 1
    config.checkpoint.every_s = 1e6
    config.log.every_rounds = 10
    return config


def of_microllama() -> Comparison:
    """Return the paper's comparison of AdLoCo and DiLoCo, from the published checkpoint."""
    config = microllama.get_config()
    if model := os.environ.get("MICROLLAMA"):
        config.model.init_from = config.data.tokenizer = model
    if shards := os.environ.get("C4"):
        config.data.path, config.data.name, config.data.heldout_split = shards, "", ""
    one = {"ensemble.num_trainers": 1, "merge.policy": "none"}
    diloco = one | {"batching.test": "constant"}
    longest = 8 * config.inner.steps_per_round
    grow = {"batching.growth": ("rounds", "batch"), "inner.max_steps_per_round": longest}
    return Comparison(
        base=config,
        variants={
            "DiLoCo, as in the paper": diloco,
            "DiLoCo": diloco | {"outer.tx": "nesterov", "outer.learning_rate": 0.7},
            "AdLoCo": {},
            "AdLoCo, one trainer": one,
            "AdLoCo, rounds grow": grow,
        },
        target_losses=(2.9,),  # nats per token; the loss of the published model is not known to us
        simulated=Cluster(num_params=304_600_000, sequence_length=512),
    )


def compared(
    size: str,
    text: str,
    variants: Mapping[str, Changes],
    *,
    seeds: tuple[int, ...],
    to: tuple[float, ...],
) -> Comparison:
    """Return the comparison of methods at a size and on a text."""
    return Comparison(get_base(size, text), variants, target_losses=to, seeds=seeds)


def tracks() -> dict[str, Comparison]:
    """Return the comparison of each record, by the record's name."""
    muon, half_muon, front = methods.muon(), methods.half_muon(), methods.front()
    half_front, few = methods.half_front(), FRESH[:3]
    return {
        "muon": compared("small", "stdlib", muon, seeds=FRESH, to=(1.65, 1.6)),
        "muon_prose": compared("small", "prose", muon, seeds=FRESH, to=(1.8, 1.76)),
        "half_muon": compared("half", "stdlib", half_muon, seeds=few, to=(1.5, 1.4, 1.32)),
        "debian": compared("small", "debian", muon, seeds=few, to=(1.76, 1.68)),
        "front": compared("small", "stdlib", front, seeds=NEXT, to=(1.65, 1.6)),
        "front_prose": compared("small", "prose", front, seeds=NEXT[:3], to=(1.8, 1.76)),
        "half_front": compared("half", "stdlib", half_front, seeds=NEXT[:3], to=(1.4, 1.32)),
        "widths": compared("small", "stdlib", methods.widths(), seeds=TRIED, to=(2.0, 1.9)),
        "microllama": of_microllama(),
    }


def ends(front: str) -> list[dict]:
    """Return the lines of older records that a front's track prints, too."""
    lines = results.read(Path(__file__).with_name(ENDS[front])).values()
    return [{**line, "variant": EARLIER[line["variant"]]} for line in lines]


def missing(comparison: Comparison, folder: Path, record: Path) -> Iterator[Trial]:
    """Yield the runs that a record lacks; it is read again for each, since others may write it."""
    for run in runs_of(comparison, folder):
        if results.key(run) not in results.read(record):
            yield run


def make(comparison: Comparison, folder: Path, record: Path, *, command: str) -> None:
    """Make the runs that a record lacks; each gets its line there, and its folder goes."""

    def keep(run: Trial) -> None:
        events = read_run(run.workdir).events
        points = curve(events, comparison.simulated)
        changes = comparison.variants[run.variant]
        results.append(record, run, changes=changes, curve=points, events=events)
        shutil.rmtree(run.workdir)
        print(run.variant, run.seed, flush=True)

    execute(missing(comparison, folder, record), on_end=keep, command=command)


def main() -> None:
    """Print what each method of a track spent, and its missing runs; with `--run`, make them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=tracks())
    parser.add_argument("--run", action="store_true", help="make the runs that are missing")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="of the missing, these alone")
    parser.add_argument("--seeds", nargs="+", type=int, help="in place of the track's")
    parser.add_argument("--record", type=Path, help="in place of studies/NAME.jsonl")
    given = parser.parse_args()
    track = tracks()[given.name]
    record = given.record or Path(__file__).with_name(f"{given.name}.jsonl")
    variants = {
        name: changes
        for name, changes in track.variants.items()
        if given.only is None or name.partition(": ")[0] in given.only
    }
    if not variants:
        parser.error(f"--only: have {', '.join(track.variants)}")
    asked = dataclasses.replace(track, variants=variants, seeds=given.seeds or track.seeds)
    folder = Path("runs") / given.name
    if given.run:
        make(asked, folder, record, command=f"python -m studies.track {given.name} --run")
    lines, kind = [*results.read(record).values()], "claims"
    if given.name in ENDS:
        lines, kind = lines + ends(given.name), "front"
    where = Path(track.base.data.path or "stdlib").name
    sizes = sorted({line["start"]["num_params"] for line in lines})
    size = "no run yet"
    if sizes:
        size = f"{' or '.join(f'{number:,}' for number in sizes)} parameters"
    for target in track.target_losses:
        tables.show(f"{where}, {size}: to {target:g} nats/token", kind, lines, target)
    seeds_left: dict[str, list[str]] = {}
    for run in missing(asked, folder, record):
        seeds_left.setdefault(run.variant, []).append(str(run.seed))
    for variant, seeds in seeds_left.items():
        print(f"not made yet: {variant}, seeds {', '.join(seeds)}")
    if seeds_left:
        print("--run makes them")


if __name__ == "__main__":
    main()
