"""Description of a source before training: rows, lengths, a sample of what a model will see."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adloco_jax.data import packing, prepared, sources
from adloco_jax.data.prepare import Request, encoded, find_shards, split, tokenising_pool
from adloco_jax.data.snapshot import HUB_NAME
from adloco_jax.data.sources import Intake
from adloco_jax.data.tokenizers import Tokenizer, check_round_trip, load_tokenizer
from adloco_jax.errors import DataError

_SAMPLED_DOCUMENTS, _SAMPLED_PER_BLOCK = 200, 10  # that are encoded and decoded again
_SOURCES = {".parquet": "parquet", ".json": "jsonl", ".jsonl": "jsonl", ".npy": "tokens"}


def guess_source(path: str) -> str:
    """The source that a path most likely means: by its first file, else a data set on the hub.

    Raises:
      ConfigError: If the path is empty.
      DataError: If it leads to no file and is no name of a data set.
    """
    if path == "stdlib":
        return path
    if prepared.is_prepared(path):
        return "tokens"
    suffix = Path(path.removesuffix(".gz")).suffix
    if HUB_NAME.fullmatch(path) and suffix not in (*_SOURCES, ".txt"):
        if not sources.local_path(path, key="path").exists():
            return "hub"
    first = sources.find_files(path, key="path")[0]
    return _SOURCES.get(Path(first.name.removesuffix(".gz")).suffix, "text")


def check(request: Request, *, processes: int = 1) -> str:
    """Read and tokenise all of a source and describe it; nothing is written.

    Args:
      request: As for `prepare`.
      processes: Processes that tokenise, besides this one; 1 does all in this one.

    Returns:
      Lines of text: rows, documents and their lengths in tokens, a sample, whether the tokenizer
      gives texts back as they were.

    Raises:
      ConfigError: If the hub gives no such data set.
      DataError: If text is missing or damaged.
      ResourceError: If a tokenising process dies.
    """
    encoder, shards = load_tokenizer(request.tokenizer), find_shards(request)
    intake = Intake(request.max_bad_rows, request.on_bad_shard == "skip")
    row_length = request.sequence_length + 1
    all_texts = itertools.chain.from_iterable(shard.read(intake) for shard in shards)
    blocks, sample, head = [], [], None
    with tokenising_pool(processes) as pool:
        for texts, found in encoded(all_texts, encoder, pool):
            if head is None:
                check_round_trip(texts, encoder)
                head = found
            sample += texts[: min(_SAMPLED_PER_BLOCK, _SAMPLED_DOCUMENTS - len(sample))]
            blocks.append(found.about)
    if head is None:
        raise DataError(f"path={request.path}: no text in it")
    documents = np.concatenate(blocks)
    train, heldout = split(request, shards, documents)
    lengths, num_bytes = documents["length"], documents["num_bytes"].sum()
    lines = [
        *left_out(intake.shards),
        f"{num_bytes} bytes of text, {lengths.sum()} tokens, "
        f"{lengths.sum() / num_bytes:.4f} tokens per byte",
        _rows_line(lengths[train].sum(), lengths[heldout].sum(), row_length),
        f"{len(documents)} documents, {heldout.sum()} of them held out",
        f"left out of training: {(~train & ~heldout).sum()} documents that are held out too",
    ]
    row = packing.choose(head, train[: len(head.about)]).tokens[:row_length]
    return "\n".join(lines + _describe(lengths, row, sample, encoder))


def check_tokens(path: str, *, tokenizer: str | None) -> str:
    """Read all of a prepared folder, compare its hashes, and describe it as `check` does.

    Args:
      path: The folder.
      tokenizer: See `load_tokenizer`; None for the one that made the folder.

    Returns:
      Lines of text, as of `check`.

    Raises:
      ConfigError: If the folder was made with another tokenizer.
      DataError: If it is damaged, or no prepared folder.
    """
    where, folder = f"path={path}", Path(path).expanduser()
    sidecar = prepared.read_sidecar(folder)
    encoder = load_tokenizer(sidecar.tokenizer if tokenizer is None else tokenizer)
    row_length, vocab_size = sidecar.row_length, encoder.vocab_size
    prepared.check_fits(sidecar, encoder, where=where, row_length=row_length)
    arrays = [rows.reshape(-1) for rows in prepared.open_rows(folder, sidecar)]
    sides = {"train.npy": sidecar.train, "heldout.npy": sidecar.heldout}
    damaged = [f for f, side in sides.items() if sources.file_sha256(folder / f) != side.sha256]
    if damaged:
        raise DataError(f"{where}: {' and '.join(damaged)} damaged; prepare the data again")
    lines = [
        "both arrays are as they were written (SHA-256)",
        f"left out of training: {sidecar.also_heldout} documents held out too",
    ]
    train, heldout = (
        packing.read_token_documents(tokens, encoder, where=where, vocab_size=vocab_size)
        for tokens in arrays
    )
    if num := np.isin(train.about["digest"], heldout.about["digest"]).sum():
        lines.append(f"{num} documents to train on are held out too; prepare the data again")
    lengths = np.concatenate([train.about["length"], heldout.about["length"]])
    lines += [
        f"{lengths.sum()} tokens",
        _rows_line(train.tokens.size, heldout.tokens.size, row_length),
        f"{len(lengths)} documents or parts of them",
    ]
    pieces = packing.cut_at_end_of_text(np.asarray(train.tokens[: 2**18]), encoder)
    texts = [encoder.decode(piece) for piece in pieces[1:-1][:_SAMPLED_DOCUMENTS] or pieces[:1]]
    return "\n".join(lines + _describe(lengths, train.tokens[:row_length], texts, encoder))


def left_out(shards: Sequence[dict]) -> list[str]:
    """A line for each skipped file, and one for bad rows; see `Intake.shards`."""
    lines = [f"left out: {shard['skipped']}" for shard in shards if "skipped" in shard]
    num_bad_rows = sum(shard.get("bad_rows", 0) for shard in shards)
    return lines + [f"left out: {num_bad_rows} bad rows"] * bool(num_bad_rows)


def _rows_line(num_train_tokens: int, num_heldout_tokens: int, row_length: int) -> str:
    return (
        f"{num_train_tokens // row_length} rows of {row_length - 1} tokens to train on, "
        f"{num_heldout_tokens // row_length} held-out rows"
    )


def _describe(
    lengths: np.ndarray, row: np.ndarray, texts: Sequence[str], encoder: Tokenizer
) -> list[str]:
    least, median, high, most = np.percentile(lengths, (0, 50, 90, 100), method="inverted_cdf")
    ids = encoder.encode_batch(texts)
    same = sum(encoder.decode(i) == text for text, i in zip(texts, ids, strict=True))
    return [
        f"tokens in a document: min {least}, median {median}, mean {lengths.mean():.1f}, 90 % "
        f"{high}, max {most}",
        f"decoded again as they were: {same} of {len(texts)} sampled documents "
        f"({same / len(texts):.1%})",
        "a model will see, for instance:",
        f"  | {packing.readable(np.asarray(row), encoder, max_chars=240)}",
    ]
