"""Tokenise and pack text once, for training to read as rows: `data.source=tokens`.

    adloco prepare PATH --output FOLDER [--tokenizer NAME] [--sequence-length L]
    adloco prepare PATH --check

PATH is a file, folder or glob of C4 shards, JSON lines, parquet or text, a data set on the Hugging
Face hub (`allenai/c4 --name en`), or `stdlib`. Stopped, the same command continues.
"""

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adloco_jax.cli.parser import Parser
from adloco_jax.data import packing, prepared
from adloco_jax.data.check import check, check_tokens, guess_source, left_out
from adloco_jax.data.prepare import SOURCES, Request, prepare
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import ConfigError
from adloco_jax.run.config_help import meanings


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


def make(request: Request, output: Path, processes: int) -> None:
    """Prepare the folder and say what is in it, and how to train on it."""
    progress = Progress()
    sidecar = prepare(request, output, processes=processes, on_progress=progress)
    if progress.first_tokens is None:
        print(f"{output}: already prepared by this request, nothing to do")
        return
    for line in left_out(sidecar.shards):
        print(line)
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
        f"{progress.tokens_per_s:.0f} tokens/s on {processes} processes\n"
        f"{output}: {sidecar.train.rows} rows of {length} tokens from {sidecar.train.documents} "
        f"documents, {sidecar.heldout.rows} held-out rows from {sidecar.heldout.documents}; "
        "a model will see, for instance:\n"
        f"  | {packing.readable(np.asarray(rows[0]), encoder, max_chars=240)}\n"
        f"train with: {shlex.join(['adloco', 'train', '--config=quickstart', *options])}"
    )


def run(words: Sequence[str]) -> int:
    """Makes a folder of rows, or shows what a model would see."""
    parser = Parser("prepare", __doc__)
    parser.add_argument("path", help="file, folder, glob, name of a data set, or stdlib")
    parser.add_argument("--output", type=Path, help="folder to make")
    parser.add_argument("--check", action="store_true", help="show what a model would see")
    parser.add_argument("--source", choices=(*SOURCES, "tokens"), help="by default from the path")
    parser.add_argument("--tokenizer", help="default: bytes, or what a prepared folder names")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="default: one per core"
    )
    meaning = meanings()
    for field in dataclasses.fields(Request):
        if field.name not in ("source", "path", "tokenizer"):
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=field.type,
                default=field.default,
                help=f"{meaning[f'data.{field.name}']}; default: {field.default!r}",
            )
    options = vars(parser.parse(words))
    path, output, processes = (options.pop(key) for key in ("path", "output", "processes"))
    if options.pop("check") == bool(output):
        raise ConfigError("give either --output FOLDER or --check")
    source = options.pop("source") or guess_source(path)
    if source == "tokens":
        if output:
            raise ConfigError(f"path={path}: tokens already; nothing to prepare")
        print(check_tokens(path, tokenizer=options["tokenizer"]))
        return 0
    options["tokenizer"] = options["tokenizer"] or "bytes"
    request = Request(source, "" if source == "stdlib" else path, **options)
    if output:
        make(request, output, processes)
    else:
        print(check(request, processes=processes))
    return 0
