"""A corpus: packed rows on the host, and the pure function from cursors to batches.

Documents are laid end to end, each closed by the end-of-text token, and the stream is cut every
L+1 tokens: no padding, no overlap. A row gives the model L inputs and the L tokens that follow
them, so a row's last token is only ever a target and its first only ever an input.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from adloco_jax.data import packing, prepared, sources
from adloco_jax.data.packing import Documents
from adloco_jax.data.sampling import stream_rows, subset_size
from adloco_jax.data.tokenizers import Tokenizer, load_fitting_tokenizer
from adloco_jax.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Packed rows, and which of them each worker stream sees when.

    Attributes:
      rows: Token ids [num_sequences, L+1], integers of any width.
      heldout_rows: The same for held-out documents, none of which is in `rows`.
      tokenizer: What made the ids.
      fingerprint: SHA-256 (hex) of both arrays and of the tokenizer's own fingerprint.
      shards: What was read, see `sources.Intake`; it names what differs where fingerprints do.
      num_documents: Documents to train on.
      num_heldout_documents: Documents held out.
      num_tokens: Tokens in `rows`.
      num_dropped_tokens: Tokens of these documents that are in no row: the tail too short for one,
        and what lies beyond `data.num_sequences`.
      tokens_per_byte: Held-out tokens over held-out UTF-8 bytes; times nats per token it gives
        nats per byte.
      seed: Decides the order, not the split.
      num_streams: Streams that each trainer's subset is divided into.
      subset_frac: Share of the rows each trainer draws from.
      num_also_heldout: Documents left out of training because a held-out one is the same.
    """

    rows: np.ndarray
    heldout_rows: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str
    shards: Sequence[dict]
    num_documents: int
    num_heldout_documents: int
    num_tokens: int
    num_dropped_tokens: int
    tokens_per_byte: float
    seed: int
    num_streams: int
    subset_frac: float
    num_also_heldout: int = 0

    @property
    def num_sequences(self) -> int:
        """Training rows, from which every trainer draws its subset."""
        return len(self.rows)

    def sequence(self, index: int) -> np.ndarray:
        """Training row `index` as int32[L+1]."""
        return self.rows[index].astype(np.int32)

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Rows `start` to `start + count - 1` of a worker stream as int32[count, L+1].

        A pure function of its arguments, the corpus and the seed: see `stream_rows`.
        """
        index = stream_rows(
            self.seed,
            trainer=trainer,
            stream=stream,
            start=start,
            count=count,
            num_rows=len(self.rows),
            num_streams=self.num_streams,
            subset_frac=self.subset_frac,
        )
        return self.rows[index].astype(np.int32)

    def sample(self, max_chars: int) -> str:
        """The first row trainer 0 trains on, decoded: one printable line, at most `max_chars`."""
        return packing.readable(self.batch(0, 0, 0, 1)[0], self.tokenizer, max_chars=max_chars)

    def describe(self) -> str:
        """The data of a run in words, with an excerpt of what the model will see."""
        lines = self.sample(240).splitlines()
        return (
            f"data: {self.num_sequences} rows of {self.rows.shape[1] - 1} tokens to train on,"
            f" {len(self.heldout_rows)} held out; a model will see, for instance:\n"
            + "\n".join(f"  | {line}" for line in lines)
        )


def load_corpus(
    *,
    source: str,
    path: str,
    heldout_path: str,
    text_column: str,
    tokenizer: str,
    sequence_length: int,
    num_sequences: int | None,
    heldout_frac: float,
    subset_frac: float,
    num_streams: int,
    seed: int,
    vocab_size: int,
    on_bad_shard: str = "reject",
    max_bad_rows: int = 0,
) -> Corpus:
    """Reads, tokenises, splits and packs a corpus, and finds all that is wrong with it.

    Without `heldout_path`, whole documents are held out, evenly along the reading order and
    whatever the seed, so runs that differ by seed share their held-out text (`split_documents`);
    a single text document is cut in two instead. A document that is the same as a held-out one,
    token by token, is not trained on. With `num_sequences`, reading stops soon after there is
    enough.

    A prepared folder (`tokens`, see `prepared`) brings its own held-out rows. Its sidecar's hashes
    stand for the arrays in the fingerprint: only sizes and shapes are looked at, not the content.

    Args:
      source: `stdlib`, `text`, `jsonl` or `tokens`.
      path: File, folder or glob, or a prepared folder; `""` for `stdlib`.
      heldout_path: The same for held-out text, used whole; `""` to split what `path` holds.
      text_column: Field of a JSON line that holds the text.
      tokenizer: See `load_tokenizer`.
      sequence_length: L; rows have L+1 tokens.
      num_sequences: Upper limit on training rows, None for all.
      heldout_frac: Share of the documents to hold out, in (0, 1); a prepared folder has its own.
      subset_frac: Share of the rows each trainer draws from, in (0, 1].
      num_streams: Worker streams that a trainer's subset is divided into.
      seed: Decides the order of the rows.
      vocab_size: The model's; every id lies below it.
      on_bad_shard: `reject` a damaged file, or `skip` it whole.
      max_bad_rows: Bad JSON lines to leave out before one is an error.

    Returns:
      The corpus, in memory in the smallest type that holds the ids; an array of tokens stays on
      disk, memory-mapped, where `heldout_path` or a prepared folder makes a split needless, and no
      document of it is held out too: otherwise the others are copied, and cut into rows again.

    Raises:
      ConfigError: If keys contradict one another, or the tokenizer does not suit the model.
      DataError: If files are missing, damaged, or hold too little.
    """
    encoder = load_fitting_tokenizer(tokenizer, vocab_size)
    where = f"data.path={path}" if path else f"data.source={source}"
    row_length = sequence_length + 1
    if source == "tokens" and prepared.is_prepared(path):
        sidecar, rows, heldout_rows = _open_prepared(
            path, heldout_path, encoder, where=where, tokenizer=tokenizer, row_length=row_length
        )
        rows = rows[:num_sequences]
        _check_enough(rows, where, num_streams, subset_frac)
        if len(heldout_rows) < packing.MIN_HELDOUT_ROWS or not sidecar.heldout.text_bytes:
            raise DataError(f"{where}: too little held-out text; prepare the data again")
        return Corpus(
            rows=rows,
            heldout_rows=heldout_rows,
            tokenizer=encoder,
            fingerprint=_prepared_fingerprint(encoder, sidecar, len(rows)),
            shards=tuple(sidecar.shards),
            num_documents=sidecar.train.documents,
            num_heldout_documents=sidecar.heldout.documents,
            num_tokens=rows.size,
            num_dropped_tokens=sidecar.train.tokens - rows.size,
            tokens_per_byte=sidecar.heldout.tokens / sidecar.heldout.text_bytes,
            seed=seed,
            num_streams=num_streams,
            subset_frac=subset_frac,
            num_also_heldout=sidecar.also_heldout,
        )
    intake = sources.Intake(max_bad_rows, on_bad_shard == "skip")
    files, heldout_files = find_sides(source, path, heldout_path)
    heldout_where = f"data.heldout_path={heldout_path}" if heldout_path else where
    max_tokens = None if num_sequences is None else num_sequences * row_length

    def read(
        files: Sequence[Path],
        where: str,
        *,
        heldout_frac: float = 0.0,
        max_tokens: int | None,
        heldout: Documents | None = None,
    ) -> Documents:
        if source != "tokens":
            return packing.encode_documents(
                _texts(source, files, text_column, intake),
                encoder,
                where=where,
                heldout_frac=heldout_frac,
                row_length=row_length,
                max_tokens=max_tokens,
                heldout=heldout,
            )
        if len(files) > 1:
            raise ConfigError(f"{where}: have {len(files)} files, data.source=tokens reads one")
        array = sources.open_tokens(files[0], row_length=row_length)
        if record := intake.open(files[0], lambda file: None):
            record["rows"] = len(array)
        if array.ndim == 2 and not heldout_files:
            raise ConfigError(
                f"{where}: ready-packed rows cannot be split by document, need data.heldout_path"
            )
        tokens = array.reshape(-1)
        end = need = tokens.size if heldout is None or max_tokens is None else max_tokens
        while True:
            found = packing.read_token_documents(
                tokens[:end], encoder, where=where, vocab_size=vocab_size
            )
            if heldout is None or end >= tokens.size:
                return found
            kept = packing.without_heldout(found, heldout).tokens.size
            if kept >= need:
                return found
            end += need - kept

    if heldout_files:
        heldout = read(heldout_files, heldout_where, max_tokens=None)
        train = read(files, where, max_tokens=max_tokens, heldout=heldout)
    elif source == "text" and sum(file.stat().st_size > 0 for file in files) == 1:
        (text,) = sources.text_documents(files, intake)
        parts = sources.cut_in_two(text, where=where, heldout_frac=heldout_frac)
        train, heldout = (packing.encode_documents([p], encoder, where=where) for p in parts)
    else:
        train, heldout = packing.split_documents(
            read(files, where, heldout_frac=heldout_frac, max_tokens=max_tokens),
            where=where,
            heldout_frac=heldout_frac,
            row_length=row_length,
        )

    num_read = len(train.lengths)
    train = packing.without_heldout(train, heldout)
    num_also_heldout = num_read - len(train.lengths)
    rows = packing.pack_rows(train.tokens, row_length)[:num_sequences]
    heldout_rows = packing.pack_rows(heldout.tokens, row_length)
    if len(heldout_rows) < packing.MIN_HELDOUT_ROWS:
        raise DataError(
            f"{heldout_where}: too little held-out text: have {len(heldout.tokens)} tokens, need "
            f"{packing.MIN_HELDOUT_ROWS} rows of {row_length} (data.sequence_length + 1); give "
            "more text, a larger data.heldout_frac or a smaller data.sequence_length"
        )
    _check_enough(rows, where, num_streams, subset_frac, num_also_heldout)
    num_heldout_bytes = packing.count_bytes(heldout, encoder)
    if not num_heldout_bytes:
        raise DataError(
            f"{heldout_where}: held-out ids decode to no text; is data.tokenizer={tokenizer} the "
            "tokenizer that made them?"
        )
    return Corpus(
        rows=rows,
        heldout_rows=heldout_rows,
        tokenizer=encoder,
        fingerprint=_fingerprint(encoder, rows, heldout_rows),
        shards=tuple(intake.shards),
        num_documents=len(train.lengths),
        num_heldout_documents=len(heldout.lengths),
        num_tokens=rows.size,
        num_dropped_tokens=len(train.tokens) - rows.size,
        tokens_per_byte=len(heldout.tokens) / num_heldout_bytes,
        seed=seed,
        num_streams=num_streams,
        subset_frac=subset_frac,
        num_also_heldout=num_also_heldout,
    )


def check_corpus(
    *,
    source: str,
    path: str,
    heldout_path: str,
    tokenizer: str,
    sequence_length: int,
    vocab_size: int,
) -> None:
    """Refuses what `load_corpus` would refuse before it reads any text.

    Args:
      source: As for `load_corpus`, like the others.
      path: Must lead to files.
      heldout_path: Must lead to files, if not empty.
      tokenizer: Is loaded.
      sequence_length: L.
      vocab_size: The model's.

    Raises:
      ConfigError: If keys contradict one another, or the tokenizer does not suit the model.
      DataError: If files or the tokenizer are missing or damaged, as far as names, sizes and
        headers tell.
    """
    encoder = load_fitting_tokenizer(tokenizer, vocab_size)
    where, row_length = f"data.path={path}", sequence_length + 1
    if source == "tokens" and prepared.is_prepared(path):
        _open_prepared(
            path, heldout_path, encoder, where=where, tokenizer=tokenizer, row_length=row_length
        )
        return
    files = [file for side in find_sides(source, path, heldout_path) for file in side]
    if source == "tokens":
        for file in files:
            sources.open_tokens(file, row_length=row_length)


def _open_prepared(
    path: str,
    heldout_path: str,
    encoder: Tokenizer,
    *,
    where: str,
    tokenizer: str,
    row_length: int,
) -> tuple[prepared.Sidecar, np.ndarray, np.ndarray]:
    """A prepared folder's sidecar, training and held-out rows."""
    if heldout_path:
        raise ConfigError(
            f"{where}: a prepared folder has its own held-out rows; leave data.heldout_path="
            f"{heldout_path} empty"
        )
    folder = Path(path).expanduser()
    sidecar = prepared.read_sidecar(folder)
    prepared.check_fits(sidecar, encoder, where=where, name=tokenizer, row_length=row_length)
    return sidecar, *prepared.open_rows(folder, sidecar)


def _check_enough(
    rows: np.ndarray,
    where: str,
    num_streams: int,
    subset_frac: float,
    num_also_heldout: int = 0,
) -> None:
    """DataError where a trainer's subset has no row for one of its streams."""
    have_rows = min(len(rows), subset_size(len(rows), subset_frac))
    if have_rows < num_streams:
        left_out = f", {num_also_heldout} documents held out too are left out"
        raise DataError(
            f"{where}: too little text: have {have_rows} rows of {rows.shape[1]} tokens for a "
            f"trainer ({len(rows)} rows in all, data.subset_frac={subset_frac}"
            f"{left_out if num_also_heldout else ''}), need "
            f"{num_streams}, one per worker stream; give more text, fewer workers "
            "(ensemble.num_workers), a larger data.subset_frac or data.num_sequences, or a smaller "
            "data.sequence_length"
        )


def find_sides(source: str, path: str, heldout_path: str) -> tuple[list[Path], list[Path]]:
    """Finds a corpus's files; none is read.

    Args:
      source: As for `load_corpus`.
      path: Likewise.
      heldout_path: Likewise.

    Returns:
      Files to train on and files held out; the latter is empty where the former are split.

    Raises:
      ConfigError: If keys contradict one another, or a file would be on both sides.
      DataError: If a path leads to no file.
    """
    if source not in ("stdlib", "text", "jsonl", "tokens"):
        raise ConfigError(f"data.source={source}: need stdlib, text, jsonl or tokens")
    if source == "stdlib":
        if path or heldout_path:
            raise ConfigError(
                f"data.source=stdlib reads the Python library itself, have "
                f"{path or heldout_path} as path; leave data.path and data.heldout_path empty, or "
                "set data.source=text"
            )
        return [], []
    files = sources.find_files(path, key="data.path")
    if not heldout_path:
        return files, []
    heldout_files = sources.find_files(heldout_path, key="data.heldout_path")
    for file in {f.resolve() for f in files} & {f.resolve() for f in heldout_files}:
        raise ConfigError(
            f"data.path={path} and data.heldout_path={heldout_path} both hold {file.name}: text "
            "that is trained on cannot be held out"
        )
    return files, heldout_files


def _texts(
    source: str, files: Sequence[Path], text_column: str, intake: sources.Intake
) -> Iterator[str]:
    if source == "stdlib":
        return sources.stdlib_documents()
    if source == "text":
        return sources.text_documents(files, intake)
    return sources.jsonl_documents(files, intake, text_column=text_column)


def _fingerprint(tokenizer: Tokenizer, *arrays: np.ndarray) -> str:
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for rows in arrays:
        digest.update(f"{rows.dtype.str} {rows.shape}".encode())
        digest.update(np.ascontiguousarray(rows).data)
    return digest.hexdigest()


def _prepared_fingerprint(tokenizer: Tokenizer, sidecar: prepared.Sidecar, num_rows: int) -> str:
    parts = (tokenizer.fingerprint, sidecar.train.sha256, num_rows, sidecar.heldout.sha256)
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()
