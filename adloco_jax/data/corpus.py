"""From the configured source to a corpus: packed rows, and a pure function from cursors to batches.

Documents are laid end to end, each closed by the end-of-text token, and the stream is cut every
L+1 tokens: no padding, no overlap. A row gives the model L inputs and the L tokens that follow
them, so a row's last token is only ever a target and its first only ever an input.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adloco_jax.data import hub, packing, prepared, sources
from adloco_jax.data.packing import Documents
from adloco_jax.data.sampling import RowOrder, stream_rows
from adloco_jax.data.snapshot import HUB_NAME
from adloco_jax.data.sources import Intake
from adloco_jax.data.tokenizers import Tokenizer, load_fitting_tokenizer
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.settings import Data, Settings

DocumentsFn = Callable[[Data, Sequence[Path], Intake], Iterable[str]]


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Rows in memory or on disk, and the order in which each worker stream sees them.

    Attributes:
      rows: Token ids [num_sequences, L+1], integers of any width; of `labelled`, with two fields
        more.
      heldout_rows: The same for held-out documents, none of which is in `rows`.
      tokenizer: What made the ids.
      fingerprint: SHA-256 (hex) of both arrays and of the tokenizer's own fingerprint.
      shards: What was read, see `sources.Intake`; names the files that explain a new fingerprint.
      num_documents: Documents to train on.
      num_heldout_documents: Documents held out.
      tokens_per_byte: Held-out tokens over held-out UTF-8 bytes; times nats per token it gives
        nats per byte. None where the loss is not per token.
      num_also_heldout: Documents left out of training because a held-out one is the same.
      order: Of the rows in worker streams; decides nothing about the split.
      num_truncated: Labelled texts of which only the first tokens are in a row.
      description: The data in words, in place of those for plain text.
    """

    rows: np.ndarray
    heldout_rows: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str
    shards: Sequence[dict]
    num_documents: int
    num_heldout_documents: int
    tokens_per_byte: float | None
    num_also_heldout: int
    order: RowOrder
    num_truncated: int = 0
    description: str = ""

    @property
    def num_sequences(self) -> int:
        """Training rows, from which every trainer draws its subset."""
        return len(self.rows)

    def sequence(self, index: int) -> np.ndarray:
        """Training row `index` as int32[L+1]."""
        return self.rows[index].astype(np.int32)

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Rows `start` to `start + count - 1` of a worker stream as int32[count, L+1].

        A pure function of its arguments, the corpus and the seed.

        Args:
          trainer: Permanent id of the trainer.
          stream: Stream number in [0, num_streams).
          start: Rows this stream has given out so far (the cursor).
          count: Rows wanted.
        """
        index = stream_rows(self.order, trainer=trainer, stream=stream, start=start, count=count)
        return self.rows[index].astype(np.int32)

    def describe(self) -> str:
        """The data of a run in words, with an excerpt of what the model will see."""
        if self.description:
            return self.description
        excerpt = packing.readable(self.batch(0, 0, 0, 1)[0], self.tokenizer, max_chars=240)
        return (
            f"data: {len(self.rows)} rows of {self.rows.shape[1] - 1} tokens to train on,"
            f" {len(self.heldout_rows)} held out; a model will see, for instance:\n  | {excerpt}"
        )


def row_order(
    settings: Settings, rows: np.ndarray, heldout_rows: np.ndarray, num_also_heldout: int
) -> RowOrder:
    """The order in which a run sees rows.

    Args:
      settings: The run's.
      rows: To train on.
      heldout_rows: Held out.
      num_also_heldout: Documents left out of training as copies, for the message.

    Raises:
      DataError: If a worker stream would have no row, or there are too few held-out rows.
    """
    data, (num_rows, row_length) = settings.data, rows.shape
    order = RowOrder(settings.seed, num_rows, settings.ensemble.num_workers, data.subset_frac)
    packing.require_heldout_rows(heldout_rows, where_of(data, heldout=True))
    have_rows = min(num_rows, order.subset_size)
    if have_rows < order.num_streams:
        left_out = f", {num_also_heldout} documents held out too are left out"
        raise DataError(
            f"{where_of(data)}: too little text: have {have_rows} rows of {row_length} tokens for a"
            f" trainer ({num_rows} rows in all, data.subset_frac={data.subset_frac}"
            f"{left_out if num_also_heldout else ''}), need {order.num_streams}, one per worker"
            " stream; give more text, fewer workers (ensemble.num_workers), a larger"
            " data.subset_frac or data.num_sequences, or a smaller data.sequence_length"
        )
    return order


def find_sides(data: Data) -> tuple[list[Path], list[Path]]:
    """Files to train on and to hold out; no held-out ones where the first have to be split.

    Args:
      data: The config's group; without a path, there are no files.

    Raises:
      ConfigError: If a file would be on both sides.
      DataError: If a path leads to no file.
    """
    if data.source == "hf" or not data.path:
        return [], []
    files = sources.find_files(data.path, key="data.path")
    if not data.heldout_path:
        return files, []
    heldout_files = sources.find_files(data.heldout_path, key="data.heldout_path")
    for file in {f.resolve() for f in files} & {f.resolve() for f in heldout_files}:
        raise ConfigError(
            f"data.path={data.path} and data.heldout_path={data.heldout_path} both hold"
            f" {file.name}: text that is trained on cannot be held out"
        )
    return files, heldout_files


def where_of(data: Data, *, heldout: bool = False) -> str:
    """The key and value that text comes from, for messages."""
    if heldout and data.heldout_path:
        return f"data.heldout_path={data.heldout_path}"
    return f"data.path={data.path}" if data.path else f"data.source={data.source}"


def fingerprint_of(tokenizer: Tokenizer, *parts: str | np.ndarray) -> str:
    """SHA-256 (hex) of the tokenizer's fingerprint and the parts in order."""
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _read_documents(settings: Settings) -> Corpus:
    """Tokenise, split and pack what `DataSource.documents` gives."""
    data = settings.data
    tokenizer = load_fitting_tokenizer(data.tokenizer, settings.model.vocab_size)
    intake = Intake()
    train, heldout = _read_sides(settings, tokenizer, intake)
    is_heldout_too = np.isin(train.about["digest"], heldout.about["digest"])
    if num_also_heldout := int(is_heldout_too.sum()):
        train = packing.choose(train, ~is_heldout_too)
    rows = packing.pack_rows(train.tokens, data.sequence_length + 1)[: data.num_sequences]
    heldout_rows = packing.pack_rows(heldout.tokens, data.sequence_length + 1)
    layouts = [f"{array.dtype.str} {array.shape}" for array in (rows, heldout_rows)]
    return Corpus(
        rows=rows,
        heldout_rows=heldout_rows,
        tokenizer=tokenizer,
        fingerprint=fingerprint_of(tokenizer, layouts[0], rows, layouts[1], heldout_rows),
        shards=tuple(intake.shards),
        num_documents=len(train.about),
        num_heldout_documents=len(heldout.about),
        tokens_per_byte=len(heldout.tokens) / int(heldout.about["num_bytes"].sum()),
        num_also_heldout=num_also_heldout,
        order=row_order(settings, rows, heldout_rows, num_also_heldout),
    )


def _read_sides(
    settings: Settings, tokenizer: Tokenizer, intake: Intake
) -> tuple[Documents, Documents]:
    """Documents to train on, some of which may be held out too, and documents to hold out."""
    data, where, source = settings.data, where_of(settings.data), DATA_SOURCES[settings.data.source]
    files, heldout_files = find_sides(data)

    def read(files: Sequence[Path], where: str, data: Data = data, **options: Any) -> Documents:
        assert source.documents is not None, f"data.source={data.source} has no documents"
        texts = _checked(source.documents(data, files, intake), where)
        return packing.encode_documents(texts, tokenizer, where=where, **options)

    if data.heldout_split:
        heldout = read([], where, dataclasses.replace(data, split=data.heldout_split))
        return read(files, where, wanted=data, heldout=heldout), heldout
    if heldout_files:
        heldout = read(heldout_files, where_of(data, heldout=True))
        return read(files, where, wanted=data, heldout=heldout), heldout
    if source.cuts_single_file and sum(file.stat().st_size > 0 for file in files) == 1:
        (text,) = sources.text_documents(files, intake)
        parts = sources.cut_in_two(text, where=where, heldout_frac=data.heldout_frac)
        train, heldout = (packing.encode_documents([t], tokenizer, where=where) for t in parts)
        return train, heldout
    return packing.split_documents(read(files, where, wanted=data), data, where=where)


def _checked(texts: Iterable[str], where: str) -> Iterator[str]:
    """The texts; what else a user's own source gives or raises is a DataError."""
    number = 0
    try:
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise DataError(f"{where}: document {number} is {type(text).__name__}, need str")
            yield text
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: after document {number}: {error}") from error


def _check_files(settings: Settings) -> list[str]:
    data = settings.data
    if any(find_sides(data)):
        return [f"data.path = {data.path}: what its files hold"]
    return [f"data.source = {data.source}: whether it is text enough"]


def _load_tokens(settings: Settings) -> Corpus:
    data = settings.data
    tokenizer, sidecar, (rows, heldout_rows) = _open_prepared(settings)
    rows = rows[: data.num_sequences]
    if not sidecar.heldout.text_bytes:
        raise DataError(f"{where_of(data)}: no held-out text; prepare the data again")
    hashes = f" {sidecar.train.sha256} {len(rows)} {sidecar.heldout.sha256}"
    return Corpus(
        rows=rows,
        heldout_rows=heldout_rows,
        tokenizer=tokenizer,
        fingerprint=fingerprint_of(tokenizer, hashes),
        shards=tuple(sidecar.shards),
        num_documents=sidecar.train.documents,
        num_heldout_documents=sidecar.heldout.documents,
        tokens_per_byte=sidecar.heldout.tokens / sidecar.heldout.text_bytes,
        num_also_heldout=sidecar.also_heldout,
        order=row_order(settings, rows, heldout_rows, sidecar.also_heldout),
    )


def _check_tokens(settings: Settings) -> list[str]:
    _open_prepared(settings)
    return []


def _open_prepared(settings: Settings) -> tuple[Tokenizer, prepared.Sidecar, list[np.ndarray]]:
    """A prepared folder's tokenizer, sidecar, training and held-out rows."""
    data, where = settings.data, where_of(settings.data)
    tokenizer = load_fitting_tokenizer(data.tokenizer, settings.model.vocab_size)
    if data.heldout_path:
        raise ConfigError(
            f"{where}: a prepared folder has its own held-out rows; leave data.heldout_path="
            f"{data.heldout_path} empty"
        )
    if not prepared.is_prepared(data.path):
        raise DataError(f"{where}: no prepared folder; make one with adloco prepare")
    folder, row_length = Path(data.path).expanduser(), data.sequence_length + 1
    sidecar = prepared.read_sidecar(folder)
    prepared.check_fits(sidecar, tokenizer, where=where, row_length=row_length)
    return tokenizer, sidecar, prepared.open_rows(folder, sidecar)


def _check_hf(settings: Settings) -> list[str]:
    data = settings.data
    if HUB_NAME.fullmatch(data.path) and not Path(data.path).exists():
        what = "whether the Hugging Face hub has it, and what it holds"
        return [f"data.path = {data.path}: {what}"]
    hub.open_stream(data.path, data.name, data.split, text_column=data.text_column)
    return []


def _hub_documents(data: Data, files: Sequence[Path], intake: Intake) -> Iterator[str]:
    found = hub.open_stream(
        data.path,
        data.name,
        data.split,
        text_column=data.text_column,
        revision=data.revision,
    )
    return intake.read_unfiled(data.path, hub.texts(found.open(), found.where, data.text_column))


@dataclasses.dataclass(frozen=True)
class DataSource:
    """How the text of a run is read.

    Attributes:
      documents: `documents(data, files, intake)` reads the files of `data.path`, and if there is a
        `data.heldout_path`, is called for its files too. `data` is the config's group. It returns
        texts in a fixed reading order. `Intake.read` records the files.
      needs: Which of the keys `path` and `text_column` must not be empty; without `path` there are
        no files.
      refuses: Keys of the group `data` that must keep their default, each with the reason.
      cuts_single_file: Whether a file is one text, and a single one is cut in two to hold text out.
      load: `load(settings)` returns the rows of a run, by default from `documents`.
      check: `check(settings)` raises what `load` raises before it reads text, and returns a line
        for each fault that only `load` finds.
    """

    documents: DocumentsFn | None = None
    needs: Sequence[str] = ("path",)
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cuts_single_file: bool = False
    load: Callable[[Settings], Corpus] = _read_documents
    check: Callable[[Settings], list[str]] = _check_files


_PARTS = "only hf has configurations and splits; leave it as it is or set data.source=hf"
_NO_PARTS = dict.fromkeys(("name", "split", "revision", "heldout_split"), _PARTS)

DATA_SOURCES: dict[str, DataSource] = {
    "stdlib": DataSource(
        lambda data, files, intake: sources.stdlib_documents(), needs=(), refuses=_NO_PARTS
    ),
    "text": DataSource(
        lambda data, files, intake: sources.text_documents(files, intake),
        refuses=_NO_PARTS,
        cuts_single_file=True,
    ),
    "jsonl": DataSource(
        lambda data, files, intake: sources.jsonl_documents(
            files, intake, text_column=data.text_column
        ),
        needs=("path", "text_column"),
        refuses=_NO_PARTS,
    ),
    "tokens": DataSource(refuses=_NO_PARTS, load=_load_tokens, check=_check_tokens),
    "hf": DataSource(
        _hub_documents,
        needs=("path", "text_column"),
        refuses={"heldout_path": "hf holds out documents of the data set itself; leave it empty"},
        check=_check_hf,
    ),
}


def load_corpus(settings: Settings) -> Corpus:
    """Read, tokenise, split and pack the configured text, and report all that is wrong.

    Without `data.heldout_path`, whole documents are held out, evenly along the reading order and
    whatever the seed, so runs that differ by seed share their held-out text (`split_documents`);
    a single text file is cut in two instead. A document that is the same as a held-out one, token
    by token, is not trained on. With `data.num_sequences`, reading of text stops soon after
    there is enough.

    A prepared folder (`tokens`, see `prepared`) brings its own held-out rows. Its sidecar's hashes
    stand for the arrays in the fingerprint: only sizes and shapes are checked, not the content.

    Args:
      settings: The run's; `data.source` names an entry of `DATA_SOURCES`.

    Returns:
      The corpus: of a prepared folder memory-mapped, else in memory in the smallest type that holds
      the ids.

    Raises:
      ConfigError: If keys contradict one another, or the tokenizer does not suit the model.
      DataError: If files are missing, damaged, or hold too little.
    """
    return DATA_SOURCES[settings.data.source].load(settings)


def check_corpus(settings: Settings) -> list[str]:
    """Refuse what `load_corpus` would refuse before it reads any text.

    Args:
      settings: The run's.

    Returns:
      What `load_corpus` would check besides, a line each.

    Raises:
      ConfigError: If keys contradict one another, or the tokenizer does not suit the model.
      DataError: If files or the tokenizer are missing or damaged, as far as names, sizes and
        headers tell.
    """
    load_fitting_tokenizer(settings.data.tokenizer, settings.model.vocab_size)
    return DATA_SOURCES[settings.data.source].check(settings)
