"""Four workers with a text each, against the same texts mixed: the steps to one mean loss.

    python -m studies.apart                 print the record, and what is not made yet
    python -m studies.apart --run           make what is missing, first

The texts are the library, the prose and Debian of studies/track.py, and SHAKESPEARE, a file that
an environment variable of this name names (the tinyshakespeare.txt of karpathy/char-rnn).

Declared before any run: DiLoCo with Muon as in the front, rounds of 110, int4, 75,600 parameters.
Both arms read the same rows in another order, apart from what a run does not reach. "apart, HeLoCo"
has the outer step of examples/heloco.py, at DiLoCo's own rate and momentum. It
enters the package only if it saves 5 % of the steps on seeds that no choice has used. Not written
yet: a worker at a quarter of the speed.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adloco_jax.cli.names import load_config
from adloco_jax.config import validate
from adloco_jax.data import load_corpus
from adloco_jax.engine.inputs import Rows
from studies import chat, methods, tables, track

RECORD = Path(__file__).with_name("apart.jsonl")
SEEDS = (61, 62, 63)
TARGET = 1.9  # nats per byte, the mean of the four texts
MOST = 3300  # sequential steps
TEXTS = {
    "library": {"data.source": "stdlib"},
    "prose": {"data.source": "jsonl", "data.path": track.TEXTS["prose"]},
    "Debian": {"data.source": "jsonl", "data.path": track.TEXTS["debian"]},
    "Shakespeare": {"data.source": "text", "data.path": os.environ.get("SHAKESPEARE", "")},
}
HELDOUT_ROWS = 128  # of each text
ARMS = {"mixed": {}, "apart": {}, "apart, HeLoCo": {"outer.tx": "heloco"}}


class Texts:
    """The rows of several texts: apart, each worker reads its own, else all read all in turn."""

    shards: Sequence[dict] = ()
    tokens_per_byte = 1.0

    def __init__(self, corpora: Sequence[Rows], *, is_apart: bool) -> None:
        """Keep the texts, one for each worker."""
        self._corpora, self._is_apart = corpora, is_apart
        self.heldout_rows = np.concatenate(
            [np.asarray(corpus.heldout_rows[:HELDOUT_ROWS]) for corpus in corpora]
        )
        self.fingerprint = " ".join(corpus.fingerprint for corpus in corpora)

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Return rows `start` to `start + count - 1` of a worker's stream.

        In both arms four rows of each worker have one place in four streams of texts.
        """
        number = len(self._corpora)
        rows = []
        for place in range(start, start + count):
            other = (stream + place) % number
            text, part = (stream, other) if self._is_apart else (other, stream)
            rows.append(self._corpora[text].batch(trainer, part, place // number, 1))
        return np.concatenate(rows)


def run(arm: str, seed: int) -> dict:
    """Train one arm until the mean loss of the texts is the target; return its line."""
    settings, corpora = {}, []
    for name, changes in TEXTS.items():
        config = track.get_base("small")
        config.update_from_flattened_dict(
            {
                **methods.steps(methods.STEPS),
                **methods.budget("small", MOST),
                **methods.STRONG,
                **ARMS[arm],
                **changes,
                "outer.precision": "int4",
                "eval.num_sequences": 16,
                "seed": seed,
            }
        )
        settings[name] = validate(config)
        corpora.append(load_corpus(settings[name], note=lambda line: None))
    texts, folder = Texts(corpora, is_apart=arm.startswith("apart")), Path("runs/apart")
    shutil.rmtree(folder, ignore_errors=True)
    heldout = texts.heldout_rows
    trained = chat.pretrain(settings["library"], texts, heldout, TARGET, folder)
    updates = None if trained is None else trained.updates
    return {"arm": arm, "seed": seed, "target": TARGET, "updates": updates}


def main() -> None:
    """Print the record and its missing runs; with `--run`, make them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="make the runs that are missing, first")
    is_run = parser.parse_args().run
    load_config(Path(__file__).parents[1] / "examples" / "heloco.py")  # adds the outer step
    for seed, arm in itertools.product(SEEDS, ARMS):
        if any((line["arm"], line["seed"]) == (arm, seed) for line in chat.read(RECORD)):
            continue
        if not is_run:
            print(f"not made yet: {arm}, seed {seed}")
            continue
        line = run(arm, seed)
        with open(RECORD, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
    rows = [("arm", "seeds", f"sequential steps to {TARGET:g}")]
    for arm in ARMS:
        lines = [line for line in chat.read(RECORD) if line["arm"] == arm]
        reached = sorted(line["updates"] for line in lines if line["updates"] is not None)
        spread = "-"
        if reached:
            middle = statistics.median_low(reached)
            spread = f"{middle:,.0f} ({reached[0]:,.0f} to {reached[-1]:,.0f})"
        rows.append((arm, f"{len(reached)} of {len(lines)}", spread))
    print(tables.markdown_table(rows))


if __name__ == "__main__":
    main()
