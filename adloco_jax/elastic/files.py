"""Files that the driver serves to learners that lack them: prepared rows, and frozen weights.

A file is read in pieces, objects `files/ROOT/NUMBER` in a `Store`; NUMBER counts from 0. The object
`files/ROOT/hashes` has the SHA-256 of each piece, 32 bytes each. ROOT, which the run's description
names, is the SHA-256 of these in hexadecimal digits. Pieces are kept in the user's cache, so that a
transfer goes on where it was cut. A file has a kind, `ROWS` or `WEIGHTS`. Prepared rows are a
folder: arrays of tokens in files that are mapped into memory, and a manifest that describes them. A
worker reads the rows in an order of its own, its stream.
"""

import concurrent.futures
import contextlib
import hashlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from adloco_jax.data import Corpus, prepared
from adloco_jax.data.corpus import fingerprint_of, rows_as_read
from adloco_jax.data.disk import write_errors
from adloco_jax.data.files import cache_folder, trim_cache
from adloco_jax.data.prepared import DocumentRows, rows_at
from adloco_jax.data.sampling import order_of, stream_rows
from adloco_jax.elastic.messages import Refused, ServedFile
from adloco_jax.elastic.store import TELL_S, Store
from adloco_jax.engine.inputs import Rows
from adloco_jax.errors import in_bytes
from adloco_jax.host.terminal import say
from adloco_jax.row_batch import RowBatch
from adloco_jax.settings import Settings

FILE_PIECE_BYTES = 2**20  # of a served file; each piece is an object and has a hash
_AT_ONCE = 4  # pieces that are asked for at the same time
_HASHES = "hashes"  # the last part of the name of the object with all hashes
_HASH_BYTES = 32  # of a SHA-256
_ALMOST_AT_ONCE_S = 1.0  # a transfer that takes no longer is not told
_FOLDER_CHARACTERS = 32  # of the hash that names a folder of the cache
# Kinds of files.
ROWS = "rows"
WEIGHTS = "weights"


def _num_pieces(file: ServedFile) -> int:
    """Return the number of pieces of a file; the last one may be shorter."""
    return math.ceil(file.size / FILE_PIECE_BYTES)


# -- The driver's side -----------------------------------------------------------------------


def files_of(corpus: Rows, init_from: str) -> dict[tuple[str, str], Path]:
    """Return the paths of files that the driver can serve, by kind and name.

    They are the files of prepared rows, if `corpus` was read from a folder of these, and the files
    of frozen weights, if `init_from` (`model.init_from`) names a folder.
    """
    found: dict[tuple[str, str], Path] = {}
    # Of rows that a caller of `fit` gave, which are of another class, no file is known.
    rows = corpus.rows if isinstance(corpus, Corpus) else None
    tokens = rows.tokens if isinstance(rows, DocumentRows) else rows
    if isinstance(tokens, np.memmap) and tokens.filename is not None:  # prepared rows
        folder = Path(tokens.filename).parent
        # All names that prepared rows can have; those of this folder are served.
        arrays = prepared.array_names(is_packed=True, is_chat=True)
        for name in [prepared.MANIFEST, *arrays]:
            if (folder / name).exists():
                found[ROWS, name] = folder / name
    weights = Path(init_from).expanduser()
    if init_from and weights.is_dir():
        for path in [*weights.glob("*.json"), *weights.glob("*.safetensors")]:
            found[WEIGHTS, path.name] = path
    return found


class Library:
    """The files that a driver serves, and their pieces by name."""

    def __init__(self, paths: Mapping[tuple[str, str], Path]):
        """Read the files once, to hash them.

        `paths` has their paths by kind and name, as `files_of` returns them.
        """
        self.files: list[ServedFile] = []  # for the run's description
        self._paths: dict[str, tuple[Path, bytes]] = {}  # by root: the path, and all hashes
        self._sizes: dict[str, int] = {}  # by root, when the file was hashed
        for (kind, name), path in paths.items():
            hashes = b"".join(hashlib.sha256(piece).digest() for piece in _pieces(path))
            root = hashlib.sha256(hashes).hexdigest()  # the file is known by this
            size = path.stat().st_size
            self.files.append(ServedFile(kind=kind, name=name, size=size, root=root))
            self._paths[root] = path, hashes
            self._sizes[root] = size

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of the object `files/ROOT/PART`, and an iterator that yields its bytes.

        PART is the number of a piece, or "hashes". A piece is read from the file only when the
        iterator is used. None: there is no such object.
        """
        _, root, part = name.split("/")
        if root not in self._paths:
            return None
        path, hashes = self._paths[root]
        if part == _HASHES:
            return len(hashes), iter([hashes])
        start = int(part) * FILE_PIECE_BYTES
        size = min(FILE_PIECE_BYTES, self._sizes[root] - start)
        if size <= 0:  # the file has fewer pieces
            return None
        return size, _part_of(path, start, size)

    def write_to(self, there: Store) -> None:
        """Write the pieces of each file, and then its hashes, unless the store has them already.

        Raises ResourceError if the store cannot be reached, ConfigError if it may not be read or
        written.
        """
        for file in self.files:
            hashes_name = f"files/{file.root}/{_HASHES}"
            # The hashes are written last: if they are there, so are the pieces.
            hashes = None
            with contextlib.suppress(Refused):  # damaged, or of another run: written anew
                hashes = there.get(hashes_name, limit=_HASH_BYTES * _num_pieces(file))
            if hashes is not None:
                continue
            say(f"{there.url}: writing {file.name}, {in_bytes(file.size)}, for learners")
            names = [f"files/{file.root}/{number}" for number in range(_num_pieces(file))]
            for name in [*names, hashes_name]:
                stored = self.get(name)
                assert stored is not None, "the library has all pieces of its files"
                _, piece = stored
                there.put(name, b"".join(piece))


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the pieces of a file in order."""
    with open(path, "rb") as file:
        while True:
            piece = file.read(FILE_PIECE_BYTES)
            if not piece:
                return
            yield piece


def _part_of(path: Path, start: int, size: int) -> Iterator[bytes]:
    """Yield `size` bytes of a file from `start` on; they are read when the iterator is used.

    If the file has become shorter since it was hashed, zeros stand for what is missing, and a
    learner refuses the piece because its hash differs.
    """
    with open(path, "rb") as file:
        file.seek(start)
        piece = file.read(size)
    yield piece.ljust(size, b"\0")


# -- The learner's side ----------------------------------------------------------------------


class CachedFile:
    """A file in the user's cache, of which pieces are read from the driver when they are needed."""

    def __init__(self, there: Store, about: ServedFile, folder: Path):
        """Read the hashes of a file's pieces, and check the pieces that are in the cache already.

        Raises Refused if the hashes are missing, or are not those that the run's description names;
        ResourceError if the driver cannot be reached, or the cache cannot be written.

        Args:
          there: The store in which the driver serves the file.
          about: The file's description.
          folder: The folder in the cache where the file is, in its full size from the beginning.
        """
        self.about = about
        self.path = folder / about.name
        self._there = there
        name = f"files/{about.root}/{_HASHES}"
        hashes = there.get(name, limit=_HASH_BYTES * _num_pieces(about))
        if hashes is None or hashlib.sha256(hashes).hexdigest() != about.root:
            raise Refused(f"{name}: missing or damaged")
        self._hashes = [
            hashes[start : start + _HASH_BYTES] for start in range(0, len(hashes), _HASH_BYTES)
        ]

        self._kept = folder / f".{about.name}.pieces"  # a byte for each piece: 1 if it is there
        with write_errors(self.path):  # an OSError becomes a ResourceError
            folder.mkdir(parents=True, exist_ok=True)
            if not self._kept.exists() or self.path.stat().st_size != about.size:
                # New, or cut off: a file of this size, of which no piece is there.
                self.path.touch()
                os.truncate(self.path, about.size)
                self._kept.write_bytes(bytes(_num_pieces(about)))
        marks = np.frombuffer(self._kept.read_bytes(), np.uint8)
        self._has = np.zeros(_num_pieces(about), bool)  # which pieces are there, and right
        with open(self.path, "rb") as file:
            for number in np.flatnonzero(marks):
                file.seek(int(number) * FILE_PIECE_BYTES)
                self._has[number] = self._is_right(int(number), file.read(FILE_PIECE_BYTES))

    def _is_right(self, number: int, piece: bytes) -> bool:
        """Whether a piece has the hash that belongs to its number."""
        return hashlib.sha256(piece).digest() == self._hashes[number]

    def read(self, numbers: Iterable[int] | None = None) -> None:
        """Read the pieces that are not in the cache yet from the driver, and write them there.

        `numbers` are those that are needed; None: all of the file. Raises Refused if a piece is
        missing or damaged at the driver; ResourceError if the cache cannot be written, or the
        driver cannot be reached.
        """
        wanted = numbers
        if wanted is None:
            wanted = range(_num_pieces(self.about))
        missing = [number for number in wanted if not self._has[number]]
        if not missing:
            return
        total = min(len(missing) * FILE_PIECE_BYTES, self.about.size)  # the last one is shorter
        progress = _Progress(self.about.name, total)
        with (
            write_errors(self.path),  # an OSError becomes a ResourceError
            concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool,
            open(self.path, "r+b") as file,
            open(self._kept, "r+b") as kept,
            contextlib.closing(progress),
        ):
            pieces = pool.map(self._fetch, missing)
            try:
                for number, piece in zip(missing, pieces, strict=True):
                    file.seek(number * FILE_PIECE_BYTES)
                    file.write(piece)
                    file.flush()  # a piece is marked as there only after it has been written
                    kept.seek(number)
                    kept.write(b"\1")
                    self._has[number] = True
                    progress.add(len(piece))
            finally:  # after an error, as on a full disk, the rest must not be read into memory
                pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, number: int) -> bytes:
        """Read a piece from the driver, and return it.

        Raises Refused if it is missing or damaged, ResourceError if the driver cannot be reached.
        """
        name = f"files/{self.about.root}/{number}"
        piece = self._there.get(name, limit=FILE_PIECE_BYTES)
        if piece is None or not self._is_right(number, piece):
            raise Refused(f"{name}: missing or damaged (SHA-256)")
        return piece


class _Progress:
    """Shows how much of a file has come: a bar in a terminal, else a line now and then."""

    def __init__(self, name: str, total: int):
        """Show the bar of the file `name`, of which `total` bytes are to come."""
        self._name = name
        self._total = total
        self._done = 0  # bytes that have come
        self._start_s = time.monotonic()
        self._told_s = self._start_s  # when the last line was printed
        self._bar = tqdm(
            total=total,
            disable=None,  # without a terminal
            leave=False,
            unit="B",
            unit_scale=True,
            desc=name,
        )

    def add(self, num_bytes: int) -> None:
        """Count bytes that have come; without a bar, print a line if the last one is long ago."""
        self._bar.update(num_bytes)
        self._done += num_bytes
        now_s = time.monotonic()
        if self._bar.disable and now_s > self._told_s + TELL_S:
            self._told_s = now_s
            # At the rate at which the bytes up to now have come.
            left_s = (self._total - self._done) * (now_s - self._start_s) / self._done
            done, total = in_bytes(self._done), in_bytes(self._total)
            say(f"{self._name}: {done} of {total} have come, {left_s:.0f} s left")

    def close(self) -> None:
        """End the bar; if all bytes have come, print how long that took, unless it was short."""
        self._bar.close()
        seconds = time.monotonic() - self._start_s
        if seconds > _ALMOST_AT_ONCE_S and self._done == self._total:
            rate = 8e-6 * self._done / seconds  # megabits a second
            say(f"{self._name}: {in_bytes(self._done)} in {seconds:.1f} s, {rate:.1f} Mbit/s")


def _cached(there: Store, files: Sequence[ServedFile], kind: str) -> dict[str, CachedFile]:
    """Return the files of a kind, by name, all in one folder of the user's cache.

    `there` is the store in which the driver serves them, and `files` are all that it serves. The
    folder is named by the content of these files, so that other runs with the same ones find it.
    Only the hashes are read here, no pieces. Raises Refused if those of a file are missing or
    damaged; ResourceError if the driver cannot be reached, or the cache cannot be written.
    """
    wanted = [file for file in files if file.kind == kind]
    roots = sorted(file.root for file in wanted)
    key = hashlib.sha256("".join(roots).encode()).hexdigest()
    folder = cache_folder("served") / key[:_FOLDER_CHARACTERS]
    return {file.name: CachedFile(there, file, folder) for file in wanted}


def served_weights(there: Store, files: Sequence[ServedFile]) -> Path:
    """Read all files of weights that the driver serves; return the folder in the cache with them.

    `there` is the store in which the driver serves `files`, of which one at least has weights.
    Raises Refused if a piece is missing or damaged, ResourceError if one cannot be read or stored.
    """
    cached = [*_cached(there, files, WEIGHTS).values()]
    for file in cached:
        file.read()
    return cached[0].path.parent


class ServedRows:
    """The rows of a run; those that a worker trains on come from the driver when it needs them.

    `engine.inputs.Rows` describes the attributes and `batch`.
    """

    def __init__(
        self,
        there: Store,
        files: Sequence[ServedFile],
        settings: Settings,
        *,
        num_classes: int | None,
    ):
        """Read all files of rows but one: of the tokens to train on only the first piece is read.

        `batch` reads the other pieces when it needs them.

        Args:
          there: The store in which the driver serves the files.
          files: The files that the run's description names.
          settings: The run's settings.
          num_classes: Number of classes of a classifier; None for a language model.

        Raises:
          Refused: If a file is missing or damaged.
          ResourceError: If the cache cannot be written, or the driver cannot be reached.
          DataError: If they are no prepared rows, or too few for the first batches.
        """
        trim_cache()  # deletes what was not used for long, to make room for the files
        cached = _cached(there, files, ROWS)
        self._file = cached[prepared.TRAIN.tokens]
        self._file.read([0])  # the first piece has the array's header, which `open_rows` reads
        for file in cached.values():
            if file is not self._file:
                file.read()
        folder = cached[prepared.MANIFEST].path.parent
        manifest = prepared.read_prepared(folder)
        opened = prepared.open_rows(folder, manifest)  # maps the files into memory
        # The array shows what is in the file, so also the pieces that come later.
        self._tokens = opened.train.tokens
        self._num_rows = len(self._tokens)
        # With the starts of documents if the model separates these, else the tokens alone.
        self.rows = rows_as_read(opened.train, settings.data)
        self.heldout_rows = rows_as_read(opened.heldout, settings.data)
        self.fingerprint = fingerprint_of(manifest, len(self.rows))
        self.tokens_per_byte = None  # a classifier has none
        if num_classes is None:
            self.tokens_per_byte = manifest.tokens_per_byte
        # One JSON record for each part of the data.
        self.shards = [record.model_dump(exclude_none=True) for record in manifest.files]
        # In which order each worker reads the rows; the run's seed decides it.
        self._order = order_of(settings, len(self.rows), where="the driver's rows")

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray | RowBatch:
        """Return `count` rows of a worker's stream, after reading from the driver those it lacks.

        They are int32 [count, L + 1], or a `RowBatch` if the model separates documents. `trainer`
        and `stream` are the ids of the trainer and of its worker; `start` is the first row's
        position in the worker's stream. Raises Refused if a piece is missing or damaged,
        ResourceError if it cannot be read or stored.
        """
        # The rows' positions among all rows to train on, in the order of the stream.
        index = stream_rows(self._order, trainer=trainer, stream=stream, start=start, count=count)
        row_bytes = self._tokens.strides[0]
        # Where the first row begins in the file: after the array's header.
        offset = self._file.about.size - self._num_rows * row_bytes
        numbers: set[int] = set()  # of the pieces in which the rows lie
        for row in index:
            first = offset + int(row) * row_bytes  # the position of the row's first byte
            last = first + row_bytes - 1
            numbers.update(range(first // FILE_PIECE_BYTES, last // FILE_PIECE_BYTES + 1))
        self._file.read(sorted(numbers))
        return rows_at(self.rows, index)
