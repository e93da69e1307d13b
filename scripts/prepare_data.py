"""Tokenise and pack text once, for training to read as rows: `data.source=tokens`.

    python scripts/prepare_data.py PATH --output FOLDER [--tokenizer NAME] [--sequence_length L]
    python scripts/prepare_data.py PATH --check

PATH is a file, folder or glob of C4 shards, JSON lines, parquet or text, a data set on the Hugging
Face hub (`allenai/c4 --name en`), or `stdlib`. Stopped, the same command continues.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adloco_jax.data import packing, prepared
from adloco_jax.data.check import check, check_tokens, guess_source, left_out
from adloco_jax.data.prepare import SOURCES, Request, prepare
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import ConfigError, ResourceError, UserError


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
    """Prepare the folder and say what is in it."""
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
    print(
        f"{progress.tokens_per_s:.0f} tokens/s on {processes} processes\n"
        f"{output}: {sidecar.train.rows} rows of {length} tokens from {sidecar.train.documents} "
        f"documents, {sidecar.heldout.rows} held-out rows from {sidecar.heldout.documents}; "
        "a model will see, for instance:\n"
        f"  | {packing.readable(np.asarray(rows[0]), encoder, max_chars=240)}\n"
        f"train with --config.data.source=tokens --config.data.path={output} "
        f"--config.data.tokenizer={request.tokenizer} --config.data.sequence_length={length}"
    )


def run(path: str, output: Path | None, processes: int, options: dict) -> None:
    """Make or describe what the command line names; `options` are fields of `Request`.

    Raises:
      ConfigError: If arguments contradict one another.
    """
    source = options.pop("source") or guess_source(path)
    if source != "tokens":
        options["tokenizer"] = options["tokenizer"] or "bytes"
        request = Request(source, "" if source == "stdlib" else path, **options)
        if output:
            make(request, output, processes)
        else:
            print(check(request, processes=processes))
    elif output:
        raise ConfigError(f"path={path}: tokens already; nothing to prepare")
    else:
        print(check_tokens(path, tokenizer=options["tokenizer"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit codes are those of training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="file, folder, glob, name of a data set, or stdlib")
    parser.add_argument("--output", type=Path, help="folder to make")
    parser.add_argument("--check", action="store_true", help="show what a model would see")
    parser.add_argument("--source", choices=(*SOURCES, "tokens"), help="by default from the path")
    parser.add_argument("--tokenizer", help="default: bytes, or what a prepared folder names")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    for field in dataclasses.fields(Request):
        if field.name not in ("source", "path", "tokenizer"):
            parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    options = vars(parser.parse_args(argv))
    path, output, processes = (options.pop(key) for key in ("path", "output", "processes"))
    try:
        if options.pop("check") == bool(output):
            raise ConfigError("give either --output FOLDER or --check")
        run(path, output, processes, options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    except (OSError, MemoryError) as error:
        reason = " ".join(str(error).split())[:300]
        print(f"out of resources: {reason}; the same command continues", file=sys.stderr)
        return ResourceError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
