"""Text to a prepared folder: tokenised shard by shard, and resumable.

Everything is built in `<folder>.partial`. A shard's tokens are appended to one file; the shard is
done once a file of its own holds the lengths and digests of its documents. A later start of the
same request continues behind the last shard that is done. Which documents are held out, or copies
of held-out ones, is decided when all are known: then rows are written, and their folder renamed.

Memory holds a few blocks of documents, and about 50 bytes for each document.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import platform
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np

from adloco_jax.data import hub, packing, prepared, sources
from adloco_jax.data.prepared import SIDECAR, Side, Sidecar
from adloco_jax.data.sources import Intake, stdlib_documents
from adloco_jax.data.tokenizers import Tokenizer, check_round_trip, load_tokenizer
from adloco_jax.errors import ConfigError, DataError

SOURCES = ("stdlib", "text", "jsonl", "parquet", "hub")
_SHARD_BYTES = 2**28  # of source files that are done together
_OURS = re.compile(r"tokens|whole|\.lock|\.new|\d+\.npz")  # names in the folder


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be prepared; the fields are those of the config's group `data`.

    Attributes:
      source: One of `SOURCES`; parquet and the Hugging Face hub are read by `datasets`.
      path: File, folder or glob; a data set's name for `hub`, `""` for `stdlib`.
      name: Configuration of the data set, `hub` only.
      split: Split of the data set, `hub` only.
      text_column: Field or column that holds the text; not for `text` and `stdlib`.
      tokenizer: See `load_tokenizer`.
      sequence_length: L; rows have L+1 tokens.
      heldout_frac: Share of the documents to hold out, in (0, 1).
    """

    source: str
    path: str = ""
    name: str = ""
    split: str = "train"
    text_column: str = "text"
    tokenizer: str = "bytes"
    sequence_length: int = 128
    heldout_frac: float = 0.05

    def __post_init__(self):
        """ConfigError, a line for each value that is out of range."""
        faults = [
            f"{key}={getattr(self, key)}: need {need}"
            for key, good, need in (
                ("source", self.source in SOURCES, ", ".join(SOURCES)),
                ("path", bool(self.path) != (self.source == "stdlib"), "one, except for stdlib"),
                ("sequence_length", self.sequence_length >= 1, "at least 1"),
                ("heldout_frac", 0 < self.heldout_frac < 1, "more than 0 and less than 1"),
            )
            if not good
        ]
        if faults:
            raise ConfigError("\n".join(faults))


class Shard(NamedTuple):
    """Source files, or a part of a data set: the unit that is tokenised whole or again.

    Attributes:
      files: Names and bytes; 0 bytes where there is no file.
      read: Its documents; their records are in the intake after the last one.
    """

    files: list[list]
    read: Callable[[Intake], Iterator[str]]


class _Job(NamedTuple):
    request: Request
    encoder: Tokenizer
    shards: Sequence[Shard]
    wanted: dict  # all that decides the result, as plain JSON
    folder: Path  # <output>.partial


def find_shards(request: Request) -> list[Shard]:
    """The shards of a request in reading order.

    Raises:
      ConfigError: If the hub gives no such data set.
      DataError: If a path leads to no file.
    """
    column = request.text_column
    if request.source == "stdlib":
        name = f"stdlib-{platform.python_version()}"
        return [Shard([[name, 0]], lambda taken: taken.read_unfiled("stdlib", stdlib_documents()))]
    if request.source == "hub":
        parts = hub.hub_parts(request.path, request.name, request.split, text_column=column)
        return [
            Shard([[name, 0]], functools.partial(Intake.read_unfiled, name=name, rows=rows))
            for name, rows in parts
        ]
    files = sources.find_files(request.path, key="path")
    sizes = [file.stat().st_size for file in files]
    numbers = np.cumsum([0, *sizes[:-1]]) // _SHARD_BYTES
    read = {
        "jsonl": functools.partial(sources.jsonl_documents, text_column=column),
        "parquet": functools.partial(hub.parquet_documents, text_column=column),
        "text": sources.text_documents,
    }[request.source]
    if _is_single_text(request, sizes):
        read, numbers = functools.partial(_two_parts, request), np.zeros(len(files), int)
    shards = []
    for number in np.unique(numbers):
        chosen = np.flatnonzero(numbers == number)
        names = [[files[i].name, sizes[i]] for i in chosen]
        shards.append(Shard(names, functools.partial(read, [files[i] for i in chosen])))
    return shards


def split(
    request: Request, shards: Sequence[Shard], documents: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which documents are trained on, and which are held out, as `load_corpus` decides.

    Args:
      request: Gives the share to hold out.
      shards: All shards of the request.
      documents: `DOCUMENT` [N], all of them in reading order.

    Returns:
      Two masks bool[N]; copies of held-out documents are in neither.
    """
    if _is_single_text(request, [size for shard in shards for _, size in shard.files]):
        heldout = np.arange(len(documents)) == 1
    else:
        heldout = packing.is_heldout(0, len(documents), request.heldout_frac)
    digests = documents["digest"]
    return ~heldout & ~np.isin(digests, digests[heldout]), heldout


def prepare(
    request: Request,
    folder: str | Path,
    *,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> Sidecar:
    """Make a prepared folder, or continue making it.

    The result depends on the request and the text alone, not on interruptions:
    the rows of `load_corpus` for the same text, except that too little held-out text is an error.
    A document that is the same as a held-out one, token by token, is left out of training.

    Args:
      request: What is wanted.
      folder: Where; a folder finished by the same request is left as it is.
      on_progress: Called at the start and after each block with the number of shards done, of all
        shards, and of tokens so far.

    Returns:
      The folder's sidecar.

    Raises:
      ConfigError: If the folder holds another request's result or beginning, or other files, or
        another process is preparing it.
      DataError: If text is missing, damaged, or too little.
      OSError: If the disk is full; the same request continues later.
    """
    encoder = load_tokenizer(request.tokenizer)
    shards = find_shards(request)
    wanted: dict = dataclasses.asdict(request) | {"tokenizer": encoder.fingerprint}
    wanted["path"] = request.path if request.source == "hub" else ""
    wanted["files"] = [file for shard in shards for file in shard.files]
    folder = Path(os.path.abspath(os.path.expanduser(folder)))
    partial = folder.with_name(f"{folder.name}.partial")
    if not partial.exists() and (found := _finished(folder, wanted)):
        return found
    with _lock(partial):
        sidecar = _finished(folder, wanted)
        if not sidecar:
            job = _Job(request, encoder, shards, wanted, partial)
            sidecar = _write_folder(job, *_tokenise(job, on_progress))
            os.rename(partial / "whole", folder)
            sources.sync(folder.parent)
        shutil.rmtree(partial)
    return sidecar


def _load_done(job: _Job, intake: Intake) -> list[np.ndarray]:
    """`DOCUMENT` arrays of the shards that are done; files not yet read may have changed since."""
    done = []
    for shard in job.shards:
        path = job.folder / f"{len(done)}.npz"
        if not path.exists():
            break
        try:
            with open(path, "rb") as file, np.load(file) as content:
                documents, about = content["documents"], json.loads(str(content["about"]))
            request, records = about["request"], about["records"]
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise _damaged(path) from error
        if differences := _differences(request, job.wanted | {"files": shard.files}):
            raise ConfigError(
                f"{job.folder}: another request was begun here ({differences}); give its arguments "
                "to continue it, name another folder, or delete this one"
            )
        done.append(documents)
        intake.shards += records
    return done


def _tokenise(
    job: _Job, on_progress: Callable[[int, int, int], None]
) -> tuple[np.ndarray, list[dict]]:
    """Tokenise the shards that are not done: all documents, `DOCUMENT` [N], and their records."""
    path = job.folder / "tokens"
    itemsize = packing.id_dtype(job.encoder).itemsize
    intake = Intake()
    done, total = _load_done(job, intake), len(job.shards)
    num_tokens = sum(int(documents["length"].sum()) for documents in done)
    with open(path, "ab") as file:
        if file.tell() < num_tokens * itemsize:
            raise _damaged(path)
        file.truncate(num_tokens * itemsize)
        on_progress(len(done), total, num_tokens)
        for number in range(len(done), total):
            num_records, found = len(intake.shards), [np.empty(0, packing.DOCUMENT)]
            for texts in packing.chunks(job.shards[number].read(intake)):
                block = packing.encode_chunk(texts, job.encoder)
                if not num_tokens:
                    check_round_trip(texts, job.encoder)
                file.write(block.tokens.data)
                found.append(block.about)
                num_tokens += len(block.tokens)
                on_progress(number, total, num_tokens)
            file.flush()
            os.fsync(file.fileno())
            done.append(np.concatenate(found))
            _save_done(job, number, done[-1], intake.shards[num_records:])
            on_progress(number + 1, total, num_tokens)
    return np.concatenate(done), intake.shards


def _save_done(job: _Job, number: int, documents: np.ndarray, records: list[dict]) -> None:
    request = job.wanted | {"files": job.shards[number].files}
    about = json.dumps({"request": request, "records": records})
    new = job.folder / ".new"
    with open(new, "wb") as file:
        np.savez(file, documents=documents, about=np.array(about))
    sources.sync(new)
    os.replace(new, job.folder / f"{number}.npz")
    sources.sync(job.folder)


def _write_folder(job: _Job, documents: np.ndarray, records: list[dict]) -> Sidecar:
    """Write rows and sidecar; all shards are done.

    Raises:
      DataError: If there is too little text.
    """
    request, encoder, whole = job.request, job.encoder, job.folder / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    train, heldout = split(request, job.shards, documents)
    sidecar = Sidecar(
        format=prepared.FORMAT,
        request=job.wanted,
        tokenizer=request.tokenizer,
        fingerprint=encoder.fingerprint,
        vocab_size=encoder.vocab_size,
        eot_id=encoder.eot_id,
        row_length=request.sequence_length + 1,
        heldout_frac=request.heldout_frac,
        train=_write_rows(job, "train", documents, train),
        heldout=_write_rows(job, "heldout", documents, heldout),
        shards=records,
        also_heldout=len(documents) - int(train.sum() + heldout.sum()),
    )
    (whole / SIDECAR).write_text(json.dumps(dataclasses.asdict(sidecar)) + "\n")
    for path in (whole / SIDECAR, whole):
        sources.sync(path)
    return sidecar


def _write_rows(job: _Job, name: str, documents: np.ndarray, mask: np.ndarray) -> Side:
    row_length, dtype = job.request.sequence_length + 1, packing.id_dtype(job.encoder)
    num_tokens, num_bytes = (int(documents[key][mask].sum()) for key in ("length", "num_bytes"))
    rows, least = num_tokens // row_length, packing.MIN_HELDOUT_ROWS if name == "heldout" else 1
    if rows < least:
        raise DataError(
            f"too little text: have {num_tokens} tokens in {mask.sum()} of {len(documents)} "
            f"documents for the {name} rows, need {least} rows of {row_length} (sequence_length + "
            "1); give more text, a smaller sequence_length or another heldout_frac, and delete "
            f"{job.folder}"
        )
    tokens = np.asarray(np.memmap(job.folder / "tokens", dtype, mode="r"))
    offsets = np.cumsum(np.concatenate([[0], documents["length"]]))
    runs = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    path = job.folder / "whole" / f"{name}.npy"
    with open(path, "wb") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": (rows, row_length)}
        np.lib.format.write_array_header_1_0(file, header)
        size = file.tell() + rows * row_length * dtype.itemsize
        for start, end in offsets[runs]:
            file.write(tokens[start:end].data)
        file.truncate(size)
    sources.sync(path)
    sha256 = sources.file_sha256(path)
    return Side(rows, int(mask.sum()), num_tokens, num_bytes, size, sha256)


def _is_single_text(request: Request, sizes: Sequence[int]) -> bool:
    return request.source == "text" and sum(size > 0 for size in sizes) == 1


def _differences(there: dict, wanted: dict) -> str:
    """What another request asked for, `""` for the same."""
    parts = []
    for key in sorted(there.keys() | wanted.keys()):
        old, new = there.get(key), wanted.get(key)
        if key == "files" and isinstance(old, list) and isinstance(new, list) and old != new:
            old, new = next((a, b) for a, b in itertools.zip_longest(old, new) if a != b)
            old, new = (f"{file[0]} of {file[1]}" if file else "none" for file in (old, new))
        if old != new:
            parts.append(f"{key} {old} there, {new} asked for")
    return "; ".join(parts)


def _finished(folder: Path, wanted: dict) -> Sidecar | None:
    """The sidecar of a folder that the same request made; None if missing or empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not prepared.is_prepared(folder):
        raise ConfigError(f"{folder}: there, and no prepared folder; name another")
    sidecar = prepared.read_sidecar(folder)
    if differences := _differences(sidecar.request, wanted):
        raise ConfigError(
            f"{folder}: holds what another request made ({differences}), and is never overwritten; "
            "name another folder"
        )
    return sidecar


@contextlib.contextmanager
def _lock(partial: Path) -> Iterator[None]:
    """Lock the folder for this process; refuse one with files of others."""
    partial.mkdir(parents=True, exist_ok=True)
    if others := [file.name for file in partial.iterdir() if not _OURS.fullmatch(file.name)]:
        raise ConfigError(
            f"{partial}: in the way, holds {others[0]}; name another output, or delete it if an "
            "earlier version of this program began it"
        )
    try:
        with filelock.FileLock(partial / ".lock", timeout=0):
            yield
    except filelock.Timeout as error:
        raise ConfigError(f"{partial}: another process is at work on it") from error


def _damaged(path: Path) -> DataError:
    return DataError(f"{path}: damaged; delete {path.parent} and start again")


def _two_parts(request: Request, files: Sequence[Path], intake: Intake) -> Iterator[str]:
    where = f"path={request.path}"
    for text in sources.text_documents(files, intake):
        yield from sources.cut_in_two(text, where=where, heldout_frac=request.heldout_frac)
