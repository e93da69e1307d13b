"""What a model would see of a source, before anything is trained."""

import collections
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from adloco_jax.data import packing, prepared, sources
from adloco_jax.data.prepare import (
    End,
    Request,
    blocks_of,
    encoded,
    find_shards,
    heldout_mask,
)
from adloco_jax.data.snapshot import HUB_NAME
from adloco_jax.data.sources import Intake
from adloco_jax.data.tokenizers import Tokenizer, load_tokenizer
from adloco_jax.errors import ConfigError, DataError

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
    name = Path(path).name.removesuffix(".gz")
    is_hub_name = HUB_NAME.fullmatch(path) and Path(name).suffix not in (*_SOURCES, ".txt")
    if is_hub_name and not sources.local_path(path, key="path").exists():
        return "hub"
    first = sources.find_files(path, key="path")[0]
    return _SOURCES.get(Path(first.name.removesuffix(".gz")).suffix, "text")


def check(request: Request, *, processes: int = 1) -> str:
    """Reads and tokenises all of a source and describes it; nothing is written.

    Args:
      request: As for `prepare`.
      processes: That tokenise.

    Returns:
      Lines of text: rows, documents and their lengths in tokens, a sample, whether the tokenizer
      gives texts back as they were.

    Raises:
      ConfigError: If the hub gives no such data set.
      DataError: If text is missing or damaged.
    """
    encoder, shards = load_tokenizer(request.tokenizer), find_shards(request)
    intake = Intake(request.max_bad_rows, request.on_bad_shard == "skip")
    row_length = request.sequence_length + 1
    texts: list[str] = []
    lengths: collections.Counter[int] = collections.Counter()
    tokens, documents, num_bytes, head = [0, 0], [0, 0], 0, None
    digests: tuple[list[np.ndarray], ...] = ([], [])
    train_lengths: list[np.ndarray] = []
    for block in encoded(_sampled(blocks_of(shards, intake), texts), request, encoder, processes):
        if isinstance(block, End):
            continue
        heldout = heldout_mask(request, shards, first=sum(documents), count=len(block.lengths))
        for side, mask in enumerate((~heldout, heldout)):
            part = packing.choose(block, mask)
            documents[side] += len(part.lengths)
            tokens[side] += len(part.tokens)
            digests[side].append(part.digests)
            if side == 0:
                train_lengths.append(part.lengths)
                head = part if head is None or not head.lengths.size else head
        num_bytes += 0 if block.num_bytes is None else int(block.num_bytes.sum())
        lengths.update(block.lengths.tolist())
    if not lengths or head is None:
        raise DataError(f"path={request.path}: no text in it")
    train_digests, heldout_digests = map(np.concatenate, digests)
    is_heldout_too = np.isin(train_digests, heldout_digests)
    num_dropped = int(np.concatenate(train_lengths)[is_heldout_too].sum())
    head = packing.choose(head, ~np.isin(head.digests, heldout_digests))
    lines = [f"left out: {shard['skipped']}" for shard in intake.shards if "skipped" in shard]
    lines += [f"left out: {intake.num_bad_rows} bad rows"] * bool(intake.num_bad_rows)
    lines += [
        f"{num_bytes} bytes of text, {sum(tokens)} tokens, "
        f"{sum(tokens) / num_bytes:.4f} tokens per byte",
        _rows_line((tokens[0] - num_dropped) // row_length, tokens[1] // row_length, row_length),
        f"{sum(documents)} documents, {documents[1]} of them held out",
        f"left out of training: {is_heldout_too.sum()} documents that are held out too",
    ]
    return "\n".join(lines + _describe(lengths, head.tokens[:row_length], texts, encoder))


def check_tokens(path: str, *, tokenizer: str | None, sequence_length: int) -> str:
    """Reads all of an array of tokens, or of a prepared folder, and describes it, as `check` does.

    Args:
      path: An `.npy` file, or a prepared folder, whose hashes are then compared.
      tokenizer: See `load_tokenizer`; None for the one that made a prepared folder, else `bytes`.
      sequence_length: L, for an `.npy` file; a prepared folder has its own.

    Raises:
      ConfigError: If a prepared folder was made with another tokenizer.
      DataError: If the tokens are missing, damaged, or ids are too large for the tokenizer.
    """
    where, row_length, lines = f"path={path}", sequence_length + 1, []
    if prepared.is_prepared(path):
        folder = Path(path).expanduser()
        sidecar = prepared.read_sidecar(folder)
        row_length = sidecar.row_length
        name = sidecar.tokenizer if tokenizer is None else tokenizer
        encoder = load_tokenizer(name)
        prepared.check_fits(sidecar, encoder, where=where, name=name, row_length=row_length)
        arrays = prepared.open_rows(folder, sidecar)
        if damaged := prepared.damaged_arrays(folder, sidecar):
            raise DataError(f"{where}: {' and '.join(damaged)} damaged; prepare the data again")
        lines = ["both arrays are as they were written (SHA-256)"]
        lines.append(f"left out of training: {sidecar.also_heldout} documents held out too")
    else:
        (file, *more) = sources.find_files(path, key="path")
        if more:
            raise ConfigError(f"{where}: have {1 + len(more)} files, need one array")
        encoder = load_tokenizer(tokenizer or "bytes")
        arrays = (sources.open_tokens(file, row_length=row_length),)
    lengths: collections.Counter[int] = collections.Counter()
    sides = [
        packing.read_token_documents(
            rows.reshape(-1), encoder, where=where, vocab_size=encoder.vocab_size
        )
        for rows in arrays
    ]
    for side in sides:
        lengths.update(side.lengths.tolist())
    if len(sides) > 1 and (num := int(np.isin(sides[0].digests, sides[1].digests).sum())):
        lines.append(f"{num} documents to train on are held out too; prepare the data again")
    stream = arrays[0].reshape(-1)
    heldout_rows = len(arrays[1]) if len(arrays) > 1 else 0
    lines += [
        f"{sum(rows.size for rows in arrays)} tokens",
        _rows_line(stream.size // row_length, heldout_rows, row_length),
        f"{sum(lengths.values())} documents or parts of them",
    ]
    pieces = packing.cut_at_end_of_text(np.asarray(stream[: 2**18]), encoder)
    texts = [encoder.decode(piece) for piece in pieces[1:-1][:_SAMPLED_DOCUMENTS] or pieces[:1]]
    return "\n".join(lines + _describe(lengths, stream[:row_length], texts, encoder))


def _describe(
    lengths: collections.Counter[int], head: np.ndarray, texts: Sequence[str], encoder: Tokenizer
) -> list[str]:
    values = np.array(sorted(lengths))
    counts = np.array([lengths[int(value)] for value in values])
    ranks = np.cumsum(counts)
    median, high = (values[np.searchsorted(ranks, q * ranks[-1])] for q in (0.5, 0.9))
    same = sum(
        encoder.decode(ids) == text
        for text, ids in zip(texts, encoder.encode_batch(texts), strict=True)
    )
    return [
        f"tokens in a document: min {values[0]}, median {median}, mean "
        f"{values @ counts / ranks[-1]:.1f}, 90 % {high}, max {values[-1]}",
        f"decoded again as they were: {same} of {len(texts)} sampled documents "
        f"({same / len(texts):.1%})",
        "a model will see, for instance:",
        f"  | {packing.readable(np.asarray(head), encoder, max_chars=240)}",
    ]


def _rows_line(train: int, heldout: int, row_length: int) -> str:
    return f"{train} rows of {row_length - 1} tokens to train on, {heldout} held-out rows"


def _sampled(blocks: Iterator[list[str] | End], sample: list[str]) -> Iterator[list[str] | End]:
    """The blocks; a few documents of each are kept, up to a number in all."""
    for block in blocks:
        if not isinstance(block, End):
            sample += block[: min(_SAMPLED_PER_BLOCK, _SAMPLED_DOCUMENTS - len(sample))]
        yield block
