"""Files that the driver serves to learners that lack them: prepared rows, and frozen weights.

A file is read in pieces, objects `files/ROOT/NUMBER`. `files/ROOT/hashes` has the SHA-256 of each
piece, and ROOT, which the run's description names, is the SHA-256 of these. Pieces are kept in the
user's cache, so that a transfer goes on where it was cut.
"""

import concurrent.futures
import contextlib
import hashlib
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
_AT_ONCE = 4  # pieces that are asked for
_HASHES = "hashes"
ROWS, WEIGHTS = "rows", "weights"


def _num_pieces(file: ServedFile) -> int:
    return -(-file.size // FILE_PIECE_BYTES)


# -- The driver's side -----------------------------------------------------------------------


def files_of(corpus: Rows, init_from: str) -> dict[tuple[str, str], Path]:
    """Return the paths of files to serve, by kind and name: of rows, and of weights if named."""
    found: dict[tuple[str, str], Path] = {}
    rows = corpus.rows if isinstance(corpus, Corpus) else None
    tokens = rows.tokens if isinstance(rows, DocumentRows) else rows
    if isinstance(tokens, np.memmap) and tokens.filename is not None:
        folder = Path(tokens.filename).parent
        arrays = prepared.array_names(is_packed=True, is_chat=True)  # those that there are
        names = [prepared.MANIFEST, *arrays]
        found |= {(ROWS, name): folder / name for name in names if (folder / name).exists()}
    weights = Path(init_from).expanduser()
    if init_from and weights.is_dir():
        for path in [*weights.glob("*.json"), *weights.glob("*.safetensors")]:
            found[WEIGHTS, path.name] = path
    return found


class Library:
    """The files of a driver, and their pieces by name."""

    def __init__(self, paths: Mapping[tuple[str, str], Path]):
        """Read the files once, to hash them."""
        self.files: list[ServedFile] = []
        self._paths: dict[str, tuple[Path, bytes]] = {}  # by root, with the hashes
        for (kind, name), path in paths.items():
            hashes = b"".join(hashlib.sha256(piece).digest() for piece in _pieces(path))
            root = hashlib.sha256(hashes).hexdigest()
            size = path.stat().st_size
            self.files.append(ServedFile(kind=kind, name=name, size=size, root=root))
            self._paths[root] = path, hashes

    def read(self, name: str) -> bytes | None:
        """Return an object `files/ROOT/PART`; None if there is none."""
        _, root, part = name.split("/")
        if root not in self._paths:
            return None
        path, hashes = self._paths[root]
        if part == _HASHES:
            return hashes
        with open(path, "rb") as file:
            file.seek(int(part) * FILE_PIECE_BYTES)
            return file.read(FILE_PIECE_BYTES) or None

    def write_to(self, there: Store) -> None:
        """Write all pieces to a store that lacks them."""
        for file in self.files:
            last = f"files/{file.root}/{_HASHES}"
            if there.get(last, limit=32 * _num_pieces(file)) is not None:
                continue
            say(f"{there.url}: writing {file.name}, {in_bytes(file.size)}, for learners")
            for name in [*(f"files/{file.root}/{n}" for n in range(_num_pieces(file))), last]:
                there.put(name, self.read(name) or b"")


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(FILE_PIECE_BYTES):
            yield piece


# -- The learner's side ----------------------------------------------------------------------


class CachedFile:
    """A file in the user's cache, of which pieces are read from the driver when they are needed."""

    def __init__(self, there: Store, about: ServedFile, folder: Path):
        """Read the hashes of its pieces, and check those that are there already."""
        self.about, self.path, self._there = about, folder / about.name, there
        name = f"files/{about.root}/{_HASHES}"
        hashes = there.get(name, limit=32 * _num_pieces(about))
        if hashes is None or hashlib.sha256(hashes).hexdigest() != about.root:
            raise Refused(f"{name}: missing or damaged")
        self._hashes = [hashes[start : start + 32] for start in range(0, len(hashes), 32)]
        self._kept = folder / f".{about.name}.pieces"  # a byte for each piece that is there
        folder.mkdir(parents=True, exist_ok=True)
        if not self._kept.exists() or self.path.stat().st_size != about.size:
            self.path.touch()
            os.truncate(self.path, about.size)
            self._kept.write_bytes(bytes(_num_pieces(about)))
        marks = np.frombuffer(self._kept.read_bytes(), np.uint8)
        self._has = np.zeros(_num_pieces(about), bool)
        with open(self.path, "rb") as file:
            for number in np.flatnonzero(marks):
                file.seek(int(number) * FILE_PIECE_BYTES)
                self._has[number] = self._is_right(int(number), file.read(FILE_PIECE_BYTES))

    def _is_right(self, number: int, piece: bytes) -> bool:
        return hashlib.sha256(piece).digest() == self._hashes[number]

    def read(self, numbers: Iterable[int] | None = None) -> None:
        """Read pieces that are not there, by default all; raise Refused if one is damaged."""
        wanted = range(_num_pieces(self.about)) if numbers is None else numbers
        missing = [number for number in wanted if not self._has[number]]
        if not missing:
            return
        total = min(len(missing) * FILE_PIECE_BYTES, self.about.size)
        progress = _Progress(self.about.name, total)
        with (
            write_errors(self.path),
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
                    file.flush()
                    kept.seek(number)
                    kept.write(b"\1")
                    self._has[number] = True
                    progress.add(len(piece))
            finally:  # a full disk must not wait for the rest, which memory would hold
                pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, number: int) -> bytes:
        name = f"files/{self.about.root}/{number}"
        piece = self._there.get(name, limit=FILE_PIECE_BYTES)
        if piece is None or not self._is_right(number, piece):
            raise Refused(f"{name}: missing or damaged (SHA-256)")
        return piece


class _Progress:
    """A bar for a person, or a line now and then."""

    def __init__(self, name: str, total: int):
        self._name, self._total, self._done = name, total, 0
        self._start_s = self._told_s = time.monotonic()
        how = {"unit": "B", "unit_scale": True, "desc": name}
        self._bar = tqdm(total=total, disable=None, leave=False, **how)

    def add(self, num_bytes: int) -> None:
        """Count bytes that have come."""
        self._bar.update(num_bytes)
        self._done += num_bytes
        now_s = time.monotonic()
        if self._bar.disable and now_s > self._told_s + TELL_S:
            self._told_s = now_s
            left_s = (self._total - self._done) * (now_s - self._start_s) / self._done
            done, total = in_bytes(self._done), in_bytes(self._total)
            say(f"{self._name}: {done} of {total} have come, {left_s:.0f} s left")

    def close(self) -> None:
        """End the bar; say how long it took, if it was long."""
        self._bar.close()
        seconds = time.monotonic() - self._start_s
        if seconds > 1.0 and self._done == self._total:
            rate = 8e-6 * self._done / seconds
            say(f"{self._name}: {in_bytes(self._done)} in {seconds:.1f} s, {rate:.1f} Mbit/s")


def _cached(there: Store, files: Sequence[ServedFile], kind: str) -> dict[str, CachedFile]:
    """Return the files of a kind, in one folder of the user's cache, by name."""
    wanted = [file for file in files if file.kind == kind]
    key = hashlib.sha256("".join(sorted(file.root for file in wanted)).encode()).hexdigest()
    folder = cache_folder("served") / key[:32]
    return {file.name: CachedFile(there, file, folder) for file in wanted}


def served_weights(there: Store, files: Sequence[ServedFile]) -> Path:
    """Read all files of weights; return their folder."""
    found = _cached(there, files, WEIGHTS)
    for file in found.values():
        file.read()
    return next(iter(found.values())).path.parent


class ServedRows:
    """The rows of a run, of which those that a worker reads come from the driver."""

    def __init__(
        self,
        there: Store,
        files: Sequence[ServedFile],
        settings: Settings,
        *,
        num_classes: int | None,
    ):
        """Read all but the tokens to train on."""
        trim_cache()
        found = _cached(there, files, ROWS)
        self._file = found[prepared.TRAIN.tokens]
        for file in found.values():
            file.read([0] if file is self._file else None)
        folder = found[prepared.MANIFEST].path.parent
        manifest = prepared.read_prepared(folder)
        opened = prepared.open_rows(folder, manifest)
        self._tokens = opened.train.tokens
        self._num_rows = len(self._tokens)
        self.rows = rows_as_read(opened.train, settings.data)
        self.heldout_rows = rows_as_read(opened.heldout, settings.data)
        self.fingerprint = fingerprint_of(manifest, len(self.rows))
        self.tokens_per_byte = manifest.tokens_per_byte if num_classes is None else None
        self.shards = [record.model_dump(exclude_none=True) for record in manifest.files]
        self._order = order_of(settings, len(self.rows), where="the driver's rows")

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray | RowBatch:
        """Return rows of a worker's stream, as `Corpus.batch` does, once they are here."""
        index = stream_rows(self._order, trainer=trainer, stream=stream, start=start, count=count)
        row_bytes = self._tokens.strides[0]
        offset = self._file.about.size - self._num_rows * row_bytes  # of the first row
        first_n = offset + np.asarray(index) * row_bytes
        last_n = first_n + row_bytes - 1
        self._file.read(
            np.union1d(first_n // FILE_PIECE_BYTES, last_n // FILE_PIECE_BYTES).tolist()
        )
        return rows_at(self.rows, index)
