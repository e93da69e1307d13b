"""Text to a prepared folder, once: shard by shard, on several processes, and resumable.

Everything is built in `<folder>.partial` and renamed when whole. Tokens are appended to both arrays
as they come, and a shard counts as done once they and its line of `progress.jsonl` are on the disk;
a later start goes on from the last such line and writes over what came after. Memory holds a few
blocks of documents, whatever the size of the corpus, and 16 bytes for each.

Which documents are held out too is known in the end alone: where there are such, the others are
copied to a file of their own, which takes the place of the first once the sidecar is written.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import platform
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import filelock
import numpy as np

from adloco_jax.data import hub, packing, prepared, sources
from adloco_jax.data.packing import Documents
from adloco_jax.data.prepared import SIDECAR, SIDES, Side, Sidecar
from adloco_jax.data.sources import Intake
from adloco_jax.data.tokenizers import Tokenizer, check_round_trip, load_tokenizer
from adloco_jax.errors import ConfigError, DataError, ResourceError

SOURCES = ("stdlib", "text", "jsonl", "parquet", "hub")
_PROGRESS = "progress.jsonl"
_LOCK, _NEW = ".lock", ".new"
_KEPT = "train.kept.npy"
_MIN_SHARD_BYTES = 2**20  # of text files, which are small and many
_BLOCKS_PER_PROCESS = 4  # read ahead, so that no worker waits while a new shard is looked at


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
      on_bad_shard: `reject` a damaged file, or `skip` it whole.
      max_bad_rows: Bad rows to leave out before one is an error.
    """

    source: str
    path: str = ""
    name: str = ""
    split: str = "train"
    text_column: str = "text"
    tokenizer: str = "bytes"
    sequence_length: int = 128
    heldout_frac: float = 0.05
    on_bad_shard: str = "reject"
    max_bad_rows: int = 0

    def __post_init__(self):
        """ConfigError, a line for each value that is out of range."""
        faults = [
            f"{key}={getattr(self, key)}: need {need}"
            for key, good, need in (
                ("source", self.source in SOURCES, ", ".join(SOURCES)),
                ("path", bool(self.path) != (self.source == "stdlib"), "one, except for stdlib"),
                ("sequence_length", self.sequence_length >= 1, "at least 1"),
                ("heldout_frac", 0 < self.heldout_frac < 1, "more than 0 and less than 1"),
                ("on_bad_shard", self.on_bad_shard in ("reject", "skip"), "reject or skip"),
                ("max_bad_rows", self.max_bad_rows >= 0, "at least 0"),
            )
            if not good
        ]
        if faults:
            raise ConfigError("\n".join(faults))


@dataclasses.dataclass(frozen=True)
class Shard:
    """What is done or not done when a process is killed: source files, or a part of a data set.

    Attributes:
      files: Names and bytes of what it holds; 0 bytes where there is no file.
      read: Its documents; their records stand in the intake once the last one is out.
    """

    files: list[list]
    read: Callable[[Intake], Iterator[str]]


@dataclasses.dataclass(frozen=True)
class End:
    """Behind a shard's last block: the records of what it held."""

    records: list[dict]


def find_shards(request: Request) -> list[Shard]:
    """The shards of a request in reading order.

    Raises:
      ConfigError: If the hub gives no such data set.
      DataError: If a path leads to no file.
    """
    if request.source == "stdlib":
        return [Shard([[f"stdlib-{platform.python_version()}", 0]], _stdlib)]
    if request.source == "hub":
        parts = hub.hub_parts(request.path, request.name, request.split)
        column = request.text_column
        return [
            Shard([[name, 0]], functools.partial(_hub, name, part, column)) for name, part in parts
        ]
    files = sources.find_files(request.path, key="path")
    sizes = [file.stat().st_size for file in files]
    if _is_lone_text(request, sizes):
        return [
            Shard(
                [[file.name, size] for file, size in zip(files, sizes, strict=True)],
                functools.partial(_two_parts, files, request),
            )
        ]
    groups: list[list[int]] = []
    for number in range(len(files)):
        # A text file is one document: a shard, with its visit to the disk, is of several.
        if request.source == "text" and groups:
            if sum(sizes[i] for i in groups[-1]) < _MIN_SHARD_BYTES:
                groups[-1].append(number)
                continue
        groups.append([number])
    return [
        Shard(
            [[files[i].name, sizes[i]] for i in group],
            functools.partial(_read, request, [files[i] for i in group], files),
        )
        for group in groups
    ]


def heldout_mask(
    request: Request, shards: Sequence[Shard], *, first: int, count: int
) -> np.ndarray:
    """Which of `count` documents from number `first` on are held out, bool[count].

    As `load_corpus` splits, whatever comes after: see `packing.is_heldout`; of a single text, which
    is cut in two, the second part.
    """
    if _is_lone_text(request, [size for shard in shards for _, size in shard.files]):
        return np.arange(first, first + count) == 1
    return packing.is_heldout(first, count, request.heldout_frac)


def prepare(
    request: Request,
    folder: str | Path,
    *,
    processes: int = 1,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> Sidecar:
    """Makes a prepared folder, or goes on making it.

    The result depends on the request and the text alone, not on `processes` or on interruptions:
    the rows of `load_corpus` for the same text, except that too little held-out text is an error.
    A document that is the same as a held-out one, token by token, is left out of training.

    Args:
      request: What is wanted.
      folder: Where; a folder finished by the same request is left as it is.
      processes: That tokenise, besides the one that reads and writes; 1 does all in this one.
      on_progress: Called at the start and after each block with the number of shards done, of all
        shards, and of tokens so far.

    Returns:
      The folder's sidecar.

    Raises:
      ConfigError: If something else is in the way: another request's result or beginning, another
        process, or files that are not ours.
      DataError: If text is missing, damaged, or too little.
      ResourceError: If a process dies, as it does where memory ends.
      OSError: If the disk takes no more; the same request goes on.
    """
    if processes < 1:
        raise ConfigError(f"processes={processes}: need at least 1")
    encoder = load_tokenizer(request.tokenizer)
    shards = find_shards(request)
    wanted = _wanted(request, encoder, shards)
    folder = Path(os.path.abspath(os.path.expanduser(folder)))
    if found := _finished(folder, wanted):
        return found
    partial = folder.with_name(folder.name + ".partial")
    with _lock(partial):
        if not (partial / SIDECAR).exists():
            work = _Work(partial, request, encoder, shards)
            with contextlib.ExitStack() as stack:
                work.open(stack)
                done, intake = work.done, work.intake()
                on_progress(done, len(shards), work.num_tokens)
                blocks = encoded(blocks_of(shards[done:], intake), request, encoder, processes)
                with contextlib.closing(blocks):
                    for block in blocks:
                        if isinstance(block, End):
                            work.commit(block.records)
                        else:
                            work.append(block)
                        on_progress(work.done, len(shards), work.num_tokens)
                work.finish()
        sidecar = prepared.read_sidecar(partial)
        if differences := _differences(sidecar.request, wanted):
            raise _other(partial, differences)
        if (partial / _KEPT).exists():
            os.replace(partial / _KEPT, partial / "train.npy")
        for name in SIDES:
            os.truncate(partial / f"{name}.npy", getattr(sidecar, name).file_bytes)
            _sync(partial / f"{name}.npy")
        (partial / _PROGRESS).unlink(missing_ok=True)
        _sync(partial)
        os.rename(partial, folder)
        _sync(folder.parent)
    (folder / _LOCK).unlink(missing_ok=True)
    return sidecar


def encoded(
    blocks: Iterator[list[str] | End], request: Request, encoder: Tokenizer, processes: int
) -> Generator[Documents | End]:
    """Blocks of texts as `Documents`, tokenised on several processes and in their order.

    Raises:
      DataError: If the tokenizer leaves next to nothing of the first block.
      ResourceError: If a process dies.
    """
    blocks = _checked(blocks, encoder)
    if processes == 1:
        for block in blocks:
            yield block if isinstance(block, End) else packing.encode_chunk(block, encoder)
        return
    pool = tokenising_pool(request.tokenizer, processes)
    pending: collections.deque = collections.deque()
    try:
        for block in blocks:
            pending.append(block if isinstance(block, End) else pool.submit(encode, block))
            while len(pending) > _BLOCKS_PER_PROCESS * processes:
                yield _result(pending.popleft())
        while pending:
            yield _result(pending.popleft())
    except BrokenProcessPool as error:
        raise ResourceError(
            "a tokenising process died, as where memory ends; run the same command again, perhaps "
            "with fewer processes: it goes on"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def tokenising_pool(tokenizer: str, processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes for `encode`; they end with the one that started them, however it ends."""
    context = multiprocessing.get_context("spawn")  # the libraries have threads: no fork
    return concurrent.futures.ProcessPoolExecutor(processes, context, _start_worker, (tokenizer,))


def encode(texts: list[str]) -> Documents:
    """`packing.encode_chunk` with the tokenizer of this worker."""
    return packing.encode_chunk(texts, worker_tokenizer())


def worker_tokenizer() -> Tokenizer:
    """The tokenizer that this process of a `tokenising_pool` has loaded."""
    return _worker["tokenizer"]


def blocks_of(shards: Sequence[Shard], intake: Intake) -> Iterator[list[str] | End]:
    """Documents in order, as many at a time as are tokenised together, and each shard's end."""
    for shard in shards:
        before = len(intake.shards)
        yield from packing.chunks(shard.read(intake))
        yield End(intake.shards[before:])


def _checked(blocks: Iterator[list[str] | End], encoder: Tokenizer) -> Iterator[list[str] | End]:
    """The blocks, the first of them encoded and decoded beforehand."""
    is_first = True
    for block in blocks:
        if is_first and not isinstance(block, End):
            check_round_trip(block, encoder)
            is_first = False
        yield block


_worker: dict[str, Tokenizer] = {}  # of a tokenising process


def _start_worker(tokenizer: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread to a process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker["tokenizer"] = load_tokenizer(tokenizer)


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _result(item: concurrent.futures.Future | End) -> Documents | End:
    return item if isinstance(item, End) else item.result()


class _Work:
    """The arrays and the progress of a folder under construction."""

    def __init__(self, folder: Path, request: Request, encoder: Tokenizer, shards: Sequence[Shard]):
        self._folder, self._request, self._encoder, self._shards = folder, request, encoder, shards
        self._wanted = _wanted(request, encoder, shards)
        self._row_length = request.sequence_length + 1
        self._dtype = packing.id_dtype(encoder)
        self._counts = {name: [0, 0, 0] for name in SIDES}  # documents, tokens, bytes of text
        self.records: list[dict] = []
        self.done = 0  # shards

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self._counts.values())

    def intake(self) -> Intake:
        """Goes on with the records so far."""
        num_bad_rows = sum(record.get("bad_rows", 0) for record in self.records)
        skip = self._request.on_bad_shard == "skip"
        return Intake(self._request.max_bad_rows, skip, num_bad_rows, list(self.records))

    def open(self, stack: contextlib.ExitStack) -> None:
        """Opens what is there at the end of the last shard that is done, or makes it."""
        path = self._folder / _PROGRESS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]  # the last may be cut
        if len(whole) > 1:
            self._recall(path, whole)
        start = {"request": self._wanted}
        _write(path.with_name(_NEW), [start, *map(json.loads, whole[1:])], mode="w")
        os.replace(path.with_name(_NEW), path)
        _sync(self._folder)
        self._files, self._stack = {}, stack
        for name in SIDES:
            array = self._folder / f"{name}.npy"
            size = self._header_size + self._counts[name][1] * self._dtype.itemsize
            if not self.done:
                array.write_bytes(self._header(0))
            elif not array.is_file() or array.stat().st_size < size:
                raise DataError(
                    f"{array}: shorter than {_PROGRESS} says, damaged; delete {self._folder} and "
                    "start again"
                )
            self._files[name] = stack.enter_context(open(array, "r+b"))
            self._files[name].seek(size)

    def append(self, documents: Documents) -> None:
        """Adds documents to the arrays they belong to."""
        first = sum(count for count, _, _ in self._counts.values())
        heldout = heldout_mask(
            self._request, self._shards, first=first, count=len(documents.lengths)
        )
        for name, mask in zip(SIDES, (~heldout, heldout), strict=True):
            part = packing.choose(documents, mask)
            self._files[name].write(part.tokens.data)
            num_bytes = 0 if part.num_bytes is None else int(part.num_bytes.sum())
            added = (len(part.lengths), len(part.tokens), num_bytes)
            self._counts[name] = [a + b for a, b in zip(self._counts[name], added, strict=True)]

    def commit(self, records: list[dict]) -> None:
        """From here on the shard read last is done."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.records += records
        self.done += 1
        _write(self._folder / _PROGRESS, [{"records": records, **self._counts}], mode="a")

    def finish(self) -> None:
        """Closes the arrays with their headers and writes the sidecar; tails still stand behind.

        Raises:
          DataError: If there is too little text.
        """
        sides = {}
        also_heldout = self._leave_out_heldout()
        for name, (documents, tokens, num_bytes) in self._counts.items():
            rows = tokens // self._row_length
            least, left_out = packing.MIN_HELDOUT_ROWS, ""
            if name == "train":
                least, left_out = 1, f" ({also_heldout} that are held out too are left out)"
            if rows < least:
                raise DataError(
                    f"too little text: have {tokens} tokens in {documents} documents for the "
                    f"{name} rows{left_out}, need {least} rows of {self._row_length} "
                    "(sequence_length + 1); "
                    "give more text, a smaller sequence_length or another heldout_frac, and "
                    f"delete {self._folder}"
                )
            size = self._header_size + rows * self._row_length * self._dtype.itemsize
            file = self._files[name]
            file.seek(0)
            file.write(self._header(rows))
            file.flush()
            os.fsync(file.fileno())
            digest = _sha256(Path(file.name), size)
            sides[name] = Side(rows, documents, tokens, num_bytes, size, digest)
        sidecar = Sidecar(
            format=prepared.FORMAT,
            request=self._wanted,
            tokenizer=self._request.tokenizer,
            fingerprint=self._encoder.fingerprint,
            vocab_size=self._encoder.vocab_size,
            eot_id=self._encoder.eot_id,
            row_length=self._row_length,
            heldout_frac=self._request.heldout_frac,
            shards=self.records,
            also_heldout=also_heldout,
            **sides,
        )
        _write(self._folder / _NEW, [dataclasses.asdict(sidecar)], mode="w")
        os.replace(self._folder / _NEW, self._folder / SIDECAR)
        _sync(self._folder)

    def _leave_out_heldout(self) -> int:
        """Copies the training documents of which none is held out, if that is not all of them.

        Returns:
          How many were left out.
        """
        (self._folder / _KEPT).unlink(missing_ok=True)
        if not all(tokens for _, tokens, _ in self._counts.values()):
            return 0
        train, heldout = (
            packing.read_token_documents(
                np.memmap(
                    self._folder / f"{name}.npy",
                    self._dtype,
                    mode="r",
                    offset=self._header_size,
                    shape=(self._counts[name][1],),
                ),
                self._encoder,
                where=str(self._folder),
                vocab_size=self._encoder.vocab_size,
            )
            for name in SIDES
        )
        left_out = np.flatnonzero(np.isin(train.digests, heldout.digests))
        if not left_out.size:
            return 0
        self._files["train"] = kept = self._stack.enter_context(open(self._folder / _KEPT, "w+b"))
        kept.write(self._header(0))
        ends = np.cumsum(train.lengths)
        position = num_tokens = num_bytes = 0
        for start, end in zip((ends - train.lengths)[left_out], ends[left_out], strict=True):
            kept.write(train.tokens[position:start].data)
            num_tokens += int(end - start)
            num_bytes += len(self._encoder.decode(train.tokens[start:end]).encode())
            position = end
        kept.write(train.tokens[position:].data)
        left = (len(left_out), num_tokens, num_bytes)
        counts = zip(self._counts["train"], left, strict=True)
        self._counts["train"] = [all_of - some for all_of, some in counts]
        return len(left_out)

    def _recall(self, path: Path, lines: list[bytes]) -> None:
        """Takes over what was done for the same request; files not yet read may have changed."""
        try:
            (start, *done) = map(json.loads, lines)
            self._counts = {name: list(map(int, done[-1][name])) for name in SIDES}
            self.records = [record for line in done for record in line["records"]]
            self.done = len(done)
            num_files = sum(len(shard.files) for shard in self._shards[: self.done])
            there, wanted = (
                request | {"files": request["files"][:num_files]}
                for request in (start["request"], self._wanted)
            )
            differences = _differences(there, wanted)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: damaged; delete {path.parent} and start again") from error
        if differences:
            raise _other(path.parent, differences)

    @property
    def _header_size(self) -> int:
        return len(self._header(0))

    def _header(self, rows: int) -> bytes:
        """Of an .npy file; NumPy leaves room for the rows to grow, so its size is always one."""
        content = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            content,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (rows, self._row_length),
            },
        )
        return content.getvalue()


def _wanted(request: Request, encoder: Tokenizer, shards: Sequence[Shard]) -> dict:
    """All that decides the result, as plain JSON; of files the names and sizes."""
    wanted = dataclasses.asdict(request) | {"tokenizer": encoder.fingerprint}
    wanted["path"] = request.path if request.source == "hub" else ""
    files = [file for shard in shards for file in shard.files]
    return wanted | {"files": files}


def _is_lone_text(request: Request, sizes: Sequence[int]) -> bool:
    return request.source == "text" and sum(size > 0 for size in sizes) == 1


def _differences(there: dict, wanted: dict) -> list[str]:
    lines = []
    for key in sorted(there.keys() | wanted.keys()):
        old, new = there.get(key), wanted.get(key)
        if key == "files" and isinstance(old, list) and isinstance(new, list) and old != new:
            pairs = itertools.zip_longest(old, new)
            old, new = next((a, b) for a, b in pairs if a != b)
            old, new = (" of ".join(map(str, f)) if f else "none" for f in (old, new))
        if old != new:
            lines.append(f"{key} {old} there, {new} asked for")
    return lines


def _other(folder: Path, differences: list[str]) -> ConfigError:
    return ConfigError(
        f"{folder}: another request was begun here ({'; '.join(differences)}); give its arguments "
        "to go on with it, name another folder, or delete this one"
    )


def _finished(folder: Path, wanted: dict) -> Sidecar | None:
    """The sidecar of a folder that the same request made; None where there is room."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not prepared.is_prepared(folder):
        raise ConfigError(f"{folder}: there, and no prepared folder; name another")
    sidecar = prepared.read_sidecar(folder)
    if differences := _differences(sidecar.request, wanted):
        raise ConfigError(
            f"{folder}: holds what another request made ({'; '.join(differences)}), and is never "
            "overwritten; name another folder"
        )
    return sidecar


@contextlib.contextmanager
def _lock(partial: Path) -> Iterator[None]:
    """The folder is ours alone, and holds nothing that is not ours."""
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise ConfigError(f"{partial}: in the way, and no folder; name another output")
    partial.mkdir(parents=True, exist_ok=True)
    ours = {*(f"{name}.npy" for name in SIDES), _PROGRESS, SIDECAR, _NEW, _LOCK, _KEPT}
    if strange := sorted({entry.name for entry in partial.iterdir()} - ours):
        raise ConfigError(f"{partial}: in the way, holds {strange[0]}; name another output")
    lock = filelock.FileLock(partial / _LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise ConfigError(f"{partial}: another process is at work on it") from error
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, lines: list[dict], *, mode: str) -> None:
    with open(path, mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Forces a file, or a folder's entries, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _sha256(path: Path, size: int) -> str:
    """Of a file's first bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while size:
            part = file.read(min(size, 2**20))
            digest.update(part)
            size -= len(part)
    return digest.hexdigest()


def _read(
    request: Request, files: Sequence[Path], among: Sequence[Path], intake: Intake
) -> Iterator[str]:
    if request.source == "text":
        return sources.text_documents(files, intake, among=among)
    column = request.text_column
    if request.source == "jsonl":
        return sources.jsonl_documents(files, intake, text_column=column)
    return hub.parquet_documents(files, intake, text_column=column)


def _two_parts(files: Sequence[Path], request: Request, intake: Intake) -> Iterator[str]:
    where = f"path={request.path}"
    for text in sources.text_documents(files, intake):
        yield from sources.cut_in_two(text, where=where, heldout_frac=request.heldout_frac)


def _stdlib(intake: Intake) -> Iterator[str]:
    record = {"name": "stdlib", "bytes": 0, "sha256": "", "rows": 0, "bad_rows": 0}
    intake.shards.append(record)
    for text in hub.hashed(sources.stdlib_documents(), record):
        record["rows"] += 1
        yield text


def _hub(name: str, part: Iterable[dict], column: str, intake: Intake) -> Iterator[str]:
    return hub.hub_documents(name, part, intake, text_column=column)
