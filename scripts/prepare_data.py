"""Tokenises and packs text once, for training to read as rows: `data.source=tokens`.

    python scripts/prepare_data.py PATH --output FOLDER [--tokenizer NAME] [--sequence_length L]
    python scripts/prepare_data.py PATH --check

PATH is a file, folder or glob of C4 shards, JSON lines, parquet or text, a data set on the Hugging
Face hub (`allenai/c4 --name en`), or `stdlib`. Stopped, the same command goes on.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from adloco_jax.data import packing, prepared
from adloco_jax.data.check import check, check_tokens, guess_source
from adloco_jax.data.prepare import SOURCES, Request, prepare
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import ConfigError, ResourceError, UserError

_LINE_EVERY_S = 10.0


class Progress:
    """Shards done and tokens so far: a bar on a terminal, else a line now and then."""

    def __init__(self):
        self.start_s = self._last_s = time.monotonic()
        self.first_tokens = self.tokens = 0
        self._bar: tqdm | None = None
        self._started = False

    def __call__(self, done: int, total: int, tokens: int) -> None:
        """As `prepare`'s `on_progress`."""
        if not self._started:
            self._started, self.first_tokens = True, tokens
            if done:
                print(f"going on: {done} of {total} shards and {tokens} tokens are there")
            if sys.stdout.isatty():
                self._bar = tqdm(unit=" tokens", unit_scale=True, initial=tokens, file=sys.stdout)
        if self._bar:
            self._bar.set_description(f"shard {min(done + 1, total)} of {total}", refresh=False)
            self._bar.update(tokens - self.tokens if self.tokens else 0)
        elif time.monotonic() - self._last_s > _LINE_EVERY_S:
            self._last_s = time.monotonic()
            print(
                f"{done} of {total} shards, {tokens} tokens, {self.rate(tokens):.0f}/s", flush=True
            )
        self.tokens = tokens

    def rate(self, tokens: int) -> float:
        """Tokens per second of this process's share."""
        return (tokens - self.first_tokens) / max(1e-9, time.monotonic() - self.start_s)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar:
            self._bar.close()


def make(request: Request, output: Path, processes: int) -> None:
    """Prepares the folder and says what is in it."""
    if prepared.is_prepared(output):
        prepare(request, output)  # raises unless it is this request's own
        print(f"{output}: already prepared by this request, nothing to do")
        return
    progress = Progress()
    try:
        sidecar = prepare(request, output, processes=processes, on_progress=progress)
    finally:
        progress.close()
    for shard in sidecar.shards:
        if "skipped" in shard:
            print(f"left out: {shard['skipped']}")
    if bad := sum(shard.get("bad_rows", 0) for shard in sidecar.shards):
        print(f"left out: {bad} bad rows")
    if sidecar.also_heldout:
        print(f"left out: {sidecar.also_heldout} documents that are held out too")
    rows, _ = prepared.open_rows(output, sidecar)
    encoder = load_tokenizer(request.tokenizer)
    length = sidecar.row_length - 1
    print(f"{progress.rate(progress.tokens):.0f} tokens/s on {processes} processes")
    print(
        f"{output}: {sidecar.train.rows} rows of {length} tokens from {sidecar.train.documents} "
        f"documents, {sidecar.heldout.rows} held-out rows from {sidecar.heldout.documents}; "
        "a model will see, for instance:\n"
        f"  | {packing.readable(np.asarray(rows[0]), encoder, max_chars=240)}\n"
        f"train with --config.data.source=tokens --config.data.path={output} "
        f"--config.data.tokenizer={request.tokenizer} --config.data.sequence_length={length}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit codes are those of training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="file, folder, glob, name of a data set, or stdlib")
    parser.add_argument("--output", type=Path, help="folder to make")
    parser.add_argument("--check", action="store_true", help="show what a model would see")
    parser.add_argument("--source", choices=(*SOURCES, "tokens"), help="by default from the path")
    parser.add_argument("--name", default="", help="configuration of a hub data set, such as en")
    parser.add_argument("--split", default="train", help="split of a hub data set")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--tokenizer", help="default: bytes, or what a prepared folder names")
    parser.add_argument("--sequence_length", type=int, default=128)
    parser.add_argument("--heldout_frac", type=float, default=0.05)
    parser.add_argument("--on_bad_shard", choices=("reject", "skip"), default="reject")
    parser.add_argument("--max_bad_rows", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = vars(parser.parse_args(argv))
    output, only_check = options.pop("output"), options.pop("check")
    processes = options.pop("processes")
    try:
        if only_check == bool(output):
            raise ConfigError("give either --output FOLDER or --check")
        options["source"] = options["source"] or guess_source(options["path"])
        if options["source"] == "tokens":
            if not only_check:
                raise ConfigError(f"path={options['path']}: tokens already; nothing to prepare")
            keys = ("tokenizer", "sequence_length")
            print(check_tokens(options["path"], **{key: options[key] for key in keys}))
            return 0
        path = "" if options["source"] == "stdlib" else options["path"]
        tokenizer = options["tokenizer"] or "bytes"
        request = Request(**options | {"path": path, "tokenizer": tokenizer})
        if only_check:
            print(check(request, processes=processes))
        else:
            make(request, output, processes)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    except (OSError, MemoryError) as error:
        reason = " ".join(str(error).split())[:300]
        print(f"out of resources: {reason}; the same command goes on", file=sys.stderr)
        return ResourceError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
