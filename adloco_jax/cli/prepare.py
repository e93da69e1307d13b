"""Tokenises and packs text once, for training to read as rows: `data.source=tokens`."""

import argparse
import shlex
import sys
import time
from pathlib import Path

import numpy as np

from adloco_jax.data import packing, prepared, sources
from adloco_jax.data.prepare import Request, prepare
from adloco_jax.data.snapshot import HUB_NAME
from adloco_jax.data.tokenizers import load_tokenizer

_SOURCES = {".parquet": "parquet", ".json": "jsonl", ".jsonl": "jsonl"}


def guess_source(path: str) -> str:
    """The source that a path most likely means: by its first file, else a data set on the hub.

    Raises:
      ConfigError: If the path is empty.
      DataError: If it leads to no file and is no name of a data set.
    """
    if path == "stdlib":
        return path
    suffix = Path(path.removesuffix(".gz")).suffix
    if HUB_NAME.fullmatch(path) and suffix not in (*_SOURCES, ".txt"):
        if not sources.local_path(path, key="path").exists():
            return "hub"
    first = sources.find_files(path, key="path")[0]
    return _SOURCES.get(Path(first.name.removesuffix(".gz")).suffix, "text")


class Progress:
    """Shards done and tokens so far: one line, overwritten on a terminal, else now and then."""

    def __init__(self):
        self._start_s = self._last_s = time.monotonic()
        self.first_tokens: int | None = None  # None: nothing to do
        self.tokens_per_s = 0.0  # of this process, not of an earlier one

    def __call__(self, done: int, total: int, tokens: int) -> None:
        """See `prepare`'s `on_progress`."""
        now_s, is_terminal = time.monotonic(), sys.stdout.isatty()
        if self.first_tokens is None:
            self.first_tokens = tokens
            if done:
                print(f"continuing: {done} of {total} shards and {tokens} tokens are done")
        self.tokens_per_s = (tokens - self.first_tokens) / max(1e-9, now_s - self._start_s)
        if now_s - self._last_s > (0.5 if is_terminal else 10.0):
            self._last_s = now_s
            line = f"{done} of {total} shards, {tokens} tokens, {self.tokens_per_s:.0f}/s"
            print(line, end="\r" if is_terminal else "\n", flush=True)


def make(request: Request, output: Path) -> None:
    """Prepare the folder and say what is in it, and how to train on it."""
    progress = Progress()
    sidecar = prepare(request, output, on_progress=progress)
    if progress.first_tokens is None:
        print(f"{output}: already prepared by this request, nothing to do")
        return
    if sidecar.also_heldout:
        print(f"left out: {sidecar.also_heldout} documents that are held out too")
    rows, _ = prepared.open_rows(output, sidecar)
    encoder = load_tokenizer(request.tokenizer)
    length = sidecar.row_length - 1
    keys = {  # that these rows decide
        "data.source": "tokens",
        "data.path": output,
        "data.tokenizer": request.tokenizer,
        "data.sequence_length": length,
        "model.vocab_size": sidecar.vocab_size,
        "model.max_length": length,
    }
    options = [f"--config.{key}={value}" for key, value in keys.items()]
    print(
        f"{progress.tokens_per_s:.0f} tokens/s\n"
        f"{output}: {sidecar.train.rows} rows of {length} tokens from {sidecar.train.documents} "
        f"documents, {sidecar.heldout.rows} held-out rows from {sidecar.heldout.documents}; "
        "a model will see, for instance:\n"
        f"  | {packing.readable(np.asarray(rows[0]), encoder, max_chars=240)}\n"
        f"train with: {shlex.join(['adloco', 'train', 'quickstart', *options])}"
    )


def run(options: argparse.Namespace, command: str) -> int:
    """Makes a folder of rows."""
    how = dict(vars(options))
    path, output, kind = (how.pop(key) for key in ("source", "output", "kind"))
    source = kind or guess_source(path)
    make(Request(source, "" if source == "stdlib" else path, **how), output)
    return 0
