"""Checkpoints that are whole, verified and never overwritten.

A checkpoint is a folder named by its round: `arrays/` by Orbax, `host.json`, and `manifest.json`
with the size and SHA-256 of every file. It is written beside the others as `.staging`, forced to
disk, renamed, and read back; only then does an older one go. Orbax alone restores a flipped bit in
silence and gives up at a damaged newest step, hence the hashes and the fall-back here.

Of several processes each writes its own shards, to a file system that all see; the first one does
all the rest.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from adloco_jax.errors import CheckpointError, ResourceError
from adloco_jax.run import processes
from adloco_jax.run.crashpoints import hit

FORMAT = 2  # raised when an older reader could not understand a newer checkpoint
MAX_JSON_BYTES = 2**22  # a page for each of thousands of workers; read whole into memory
_STAGING = ".staging"
_ARRAYS, _HOST, _MANIFEST = "arrays", "host.json", "manifest.json"


T = TypeVar("T")


class Damaged(Exception):
    """A checkpoint that is not what was written; the message names the file."""


_FAULTS = (OSError, ValueError, Damaged)  # Orbax reports a full disk as ValueError


class Saved(NamedTuple):
    """What became of one save, for the ledger."""

    round: int
    size_bytes: int
    blocked_s: float  # the run waited
    save_s: float  # in all


class Saver:
    """Writes the checkpoints of one run, in the background, one at a time."""

    def __init__(self, folder: Path, *, keep: int, on_saved: Callable[[Saved], None]):
        """Removes what a killed run left half written.

        Args:
          folder: Holds the checkpoints; made at the first save.
          keep: How many of the last to keep, beside the one of the lowest held-out loss.
          on_saved: Called with each, on the writing thread, once it is verified.
        """
        self._folder, self._keep, self._on_saved = folder, keep, on_saved
        self._orbax = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._has_saved = bool(list_rounds(folder))  # in this process, or in one before
        if processes.is_first():
            shutil.rmtree(folder / _STAGING, ignore_errors=True)

    def save(self, round_index: int, arrays: PyTree, host: dict, *, loss: float | None) -> None:
        """Starts to write a checkpoint; the arrays may be donated when this returns.

        Args:
          round_index: Rounds completed; names the folder.
          arrays: A pytree of JAX arrays.
          host: Plain JSON.
          loss: Held-out loss of the consensus, where it was taken after this very round.

        Raises:
          ResourceError: If the save before this one failed, or this one cannot begin.
          CheckpointError: If the checkpoints were deleted meanwhile.
        """
        start_s = time.perf_counter()
        self.wait()
        staging = self._folder / _STAGING
        with self._write_errors(round_index, has_begun=False):
            _agreed("a checkpoint begins", _FAULTS, self._make_staging, staging)
        with self._write_errors(round_index):
            arrays = _fields(arrays)
            self._orbax.save(staging.absolute() / _ARRAYS, args=ocp.args.StandardSave(arrays))
        blocked_s = time.perf_counter() - start_s

        def finish():
            with self._write_errors(round_index):
                size_bytes = self._finish_together(round_index, host, loss)
            self._has_saved = True
            self._on_saved(Saved(round_index, size_bytes, blocked_s, time.perf_counter() - start_s))

        self._pending = self._thread.submit(finish)

    def check(self) -> None:
        """Raises what a save that is over has raised; does not wait for one under way."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is verified.

        Raises:
          ResourceError: If it failed; says which checkpoint there is to go on from.
          CheckpointError: If the checkpoints were deleted meanwhile.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the last save, whatever becomes of it, and ends the thread."""
        self._thread.shutdown()
        self._orbax.close()

    @contextlib.contextmanager
    def _write_errors(self, round_index: int, *, has_begun: bool = True) -> Iterator[None]:
        """Errors of writing as ours, with what can be done as the folder is by then."""
        try:
            yield
        except _FAULTS as error:
            target = self._folder / str(round_index)
            is_there = target.exists()
            is_deleted = has_begun and not is_there and not (self._folder / _STAGING).exists()
            what = f"the checkpoint cannot be written ({' '.join(str(error).split())[:300]})"
            room = "make room, and run the same command again"
            if is_deleted:
                what, room = "deleted while it was written", "run the same command again"
            older = [number for number in list_rounds(self._folder) if number != round_index]
            kind = CheckpointError if is_deleted else ResourceError
            if older:
                advice = f"the one before it is {self._folder / str(older[0])}; {room}"
            elif is_there:
                advice = f"no other one is there; {room}, which uses this one if it is whole"
            elif self._has_saved:
                kind = CheckpointError
                advice = "those before are gone; restore them from a copy, or name another folder"
            else:
                advice = f"none was saved before it; {room}, which starts over"
            raise kind(f"{target}: {what}; {advice}") from error

    def _finish_together(self, round_index: int, host: dict, loss: float | None) -> int:
        """Once every process has written its arrays, the first one makes a checkpoint of them."""
        _agreed("a checkpoint's arrays are written", _FAULTS, self._orbax.wait_until_finished)
        return _agreed("a checkpoint ends", _FAULTS, self._finish, round_index, host, loss)

    def _make_staging(self, staging: Path) -> None:
        hit("save.begin")
        if processes.is_first():
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    def _finish(self, round_index: int, host: dict, loss: float | None) -> int:
        if not processes.is_first():
            return 0
        staging, target = self._folder / _STAGING, self._folder / str(round_index)
        hit("save.arrays")
        (staging / _HOST).write_bytes(_encode(host))
        hit("save.host")
        files, total = {}, 0
        for name in _files(staging):
            path = staging / name
            size = os.path.getsize(path)
            files[name] = {"size": size, "sha256": _sha256(path)}
            total += size
            _sync(path)
        for folder, _, _ in os.walk(staging):
            _sync(Path(folder))
        hit("save.synced")
        content = {"format": FORMAT, "round": round_index, "loss": loss, "files": files}
        sealed = _encode(content | {"sha256": _digest(content)})
        (staging / _MANIFEST).write_bytes(sealed)
        _sync(staging / _MANIFEST)
        _sync(staging)
        hit("save.manifest")
        os.rename(staging, target)
        hit("save.renamed")
        _sync(self._folder)
        hit("save.committed")
        verify(target)
        hit("save.verified")
        self._retain()
        return total

    def _retain(self) -> None:
        """Deletes all but the last few and the best; what is damaged is left alone."""
        losses = {}
        for number in list_rounds(self._folder):
            with contextlib.suppress(Damaged):
                losses[number] = read_manifest(self._folder / str(number))["loss"]
        known = [number for number, loss in losses.items() if loss is not None]
        kept = [*list(losses)[: self._keep], *sorted(known, key=lambda n: losses[n])[:1]]
        for number in losses:
            if number not in kept:
                hit("retention.begin")
                # Renamed first: a half deleted folder must not look like a damaged checkpoint.
                os.rename(self._folder / str(number), self._folder / _STAGING)
                hit("retention.renamed")
                shutil.rmtree(self._folder / _STAGING)
                hit("retention.deleted")


def list_rounds(folder: Path) -> list[int]:
    """The rounds of the checkpoints in a folder, newest first; anything else there is ignored."""
    if not folder.is_dir():
        return []
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    return sorted((int(n) for n in names if n.isdecimal() and n == str(int(n))), reverse=True)


def last(folder: Path) -> str:
    """The newest checkpoint in a folder, in words."""
    saved = list_rounds(folder)[:1]
    return f"the last checkpoint is {folder / str(saved[0])}" if saved else "none was saved"


def verify(checkpoint: Path) -> dict:
    """Checks every file of a checkpoint against its manifest, which it returns.

    Raises:
      Damaged: If a file is missing, strange or changed; names it.
      CheckpointError: If it was written in a newer format.
    """
    manifest = read_manifest(checkpoint)
    found = set(_files(checkpoint)) - {_MANIFEST}
    for name in sorted(found ^ manifest["files"].keys()):
        what = "not in the manifest" if name in found else "missing"
        raise Damaged(f"{checkpoint / name}: {what}")
    for name in sorted(found):
        expected = manifest["files"][name]
        size = os.path.getsize(checkpoint / name)
        if size != expected["size"]:
            raise Damaged(f"{checkpoint / name}: {size} bytes, expected {expected['size']}")
        if _sha256(checkpoint / name) != expected["sha256"]:
            raise Damaged(f"{checkpoint / name}: its content has changed")
    return manifest


def read_manifest(checkpoint: Path) -> dict:
    """A checkpoint's manifest: format, round, loss and files; the files are not looked at.

    Raises:
      Damaged: If it is missing or not what was written.
      CheckpointError: If it was written in a newer format.
    """
    path = checkpoint / _MANIFEST
    if checkpoint.is_symlink():
        raise Damaged(f"{checkpoint}: a symbolic link, not a folder of this run")
    manifest = _read_json(path)
    is_as_written = path.read_bytes() == _encode(manifest)
    digest = manifest.pop("sha256", None)
    if digest != _digest(manifest) or not is_as_written:
        raise Damaged(f"{path}: does not match its own hash")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint}: written in format {manifest.get('format')}, this version reads format"
            f" {FORMAT}; use the version of adloco_jax that wrote it"
        )
    files, loss = manifest.get("files"), manifest.get("loss")
    if not (
        manifest.get("round") == int(checkpoint.name)
        and (loss is None or isinstance(loss, float))
        and isinstance(files, dict)
        and all(
            isinstance(file, dict) and file.keys() == {"size", "sha256"} for file in files.values()
        )
    ):
        raise Damaged(f"{path}: not the manifest of round {checkpoint.name}")
    return manifest


def newest(folder: Path, read: Callable[[Path], T]) -> tuple[T, list[str]] | None:
    """Reads the newest checkpoint that is whole; damaged newer ones are set aside.

    Args:
      folder: Holds the checkpoints.
      read: Reads a verified one; `Damaged` sends it on to the next older.

    Returns:
      What was read, and a line for each damaged one; None where there is no checkpoint.

    Raises:
      CheckpointError: If all there are are damaged, which are then left as they are; or if one was
        written in a newer format.
    """
    damage = []
    # Of several processes the first one looks, and all read what it has found whole.
    rounds = processes.from_first(list_rounds(folder))
    for index, number in enumerate(rounds):
        path = folder / str(number)
        try:
            check = verify if processes.is_first() else read_manifest
            _agreed("a checkpoint's files", Damaged, check, path)
            found = _agreed("a checkpoint's content", Damaged, read, path)
        except Damaged as error:
            damage.append(str(error))
            continue
        for damaged in rounds[:index] if processes.is_first() else ():
            aside = folder / f"{damaged}.damaged"
            while aside.exists():
                aside = aside.with_name(aside.name + "+")
            os.rename(folder / str(damaged), aside)
        hit("restore.read")
        return found, damage
    if damage:
        raise CheckpointError(
            "\n".join([*damage, f"{folder}: no checkpoint is whole; restore one from a copy"])
        )
    return None


def read_host(checkpoint: Path) -> dict:
    """The host's half of a verified checkpoint."""
    return _read_json(checkpoint / _HOST)


def read_arrays(checkpoint: Path, template: PyTree) -> PyTree:
    """The arrays of a verified checkpoint, each where the template's sharding says.

    Args:
      checkpoint: The folder.
      template: A pytree of `jax.ShapeDtypeStruct` with shardings, of the saved shapes.

    Raises:
      Damaged: If they do not have the template's structure, shapes and types.
    """
    arrays = checkpoint.absolute() / _ARRAYS
    # Each process by itself: where one of them cannot read, the others must not wait within Orbax.
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    with contextlib.closing(ocp.Checkpointer(handler, multiprocessing_options=alone)) as reader:
        try:
            # The shapes first: nothing of another size is read, or memory taken for it.
            stored, expected = _shapes(reader.metadata(arrays).item_metadata), _shapes(template)
            for name in sorted(stored.keys() | expected.keys()):
                if stored.get(name) != expected.get(name):
                    raise Damaged(
                        f"{arrays}: {name} is {stored.get(name)}, expected {expected.get(name)}"
                    )
            restored = reader.restore(arrays, args=ocp.args.StandardRestore(_fields(template)))
            is_state = dataclasses.is_dataclass(template)
            return dataclasses.replace(template, **restored) if is_state else restored
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise Damaged(f"{arrays}: unreadable ({reason})") from error


def _fields(state: PyTree) -> PyTree:
    """A state's fields by name, but for those that it does without: older checkpoints lack them."""
    if not dataclasses.is_dataclass(state):
        return state
    arrays = [f.name for f in dataclasses.fields(state) if f.metadata.get("pytree_node", True)]
    named = {name: getattr(state, name) for name in arrays}
    return {name: value for name, value in named.items() if value is not None}


def _shapes(tree: PyTree) -> dict[str, str]:
    """Type and shape of every leaf, by a path that is the same with and without the classes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _files(folder: Path) -> list[str]:
    """Every file below a folder, as a path from there."""
    names = []
    for root, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(root, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise Damaged(f"{path}: not a regular file")
        names += [Path(root, name).relative_to(folder).as_posix() for name in files]
    return sorted(names)


def _read_json(path: Path) -> dict:
    try:
        if path.is_symlink() or not path.is_file():
            raise Damaged(f"{path}: missing or not a regular file")
        if os.path.getsize(path) > MAX_JSON_BYTES:
            raise Damaged(f"{path}: {os.path.getsize(path)} bytes, more than {MAX_JSON_BYTES}")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: unreadable ({error})") from error
    if not isinstance(content, dict):
        raise Damaged(f"{path}: no JSON object")
    return content


def _encode(content: dict) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(f"{path}: unreadable ({error.strerror})") from error


def _sync(path: Path) -> None:
    """Forces a file, or a folder's entries, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _agreed(
    name: str,
    faults: type[Exception] | tuple[type[Exception], ...],
    act: Callable[..., T],
    *arguments: Any,
) -> T:
    """Does a part of a save, or of a restore, in every process: in none of them does it fail alone.

    Args:
      name: Of the part.
      faults: How it may fail.
      act: What to do.
      *arguments: Of that.

    Returns:
      What it has returned here.

    Raises:
      Exception: This process's own fault, or `Damaged` where another one had one.
    """
    try:
        outcome, fault = act(*arguments), None
    except faults as error:
        outcome, fault = None, error
    said = processes.tell(name, "" if fault is None else str(fault) or repr(fault))
    if fault is not None:
        raise fault
    if failed := [f"process {number}: {what}" for number, what in enumerate(said) if what]:
        raise Damaged("; ".join(failed))
    return cast(T, outcome)
