"""Write and read checkpoints, which are complete, verified and never overwritten.

A checkpoint is a folder, `checkpoints/ROUND`:

- `arrays/`, by Orbax: the fields of `core.types.Ensemble` that a run has
  - `params_M`: parameters of each trainer (of an adapter, those of its matrices alone)
  - `outer_state_M`: state of each trainer's outer optimizer
  - `inner_state_R`: state of each worker's inner optimizer
  - `params_R`: each worker's own parameters (Streaming DiLoCo)
  - `average_M`: running average of each trainer's parameters (`outer.average`)
  - `round`: number of rounds completed
- `host.json` (`restore.host_record`)
  - `control` (`loop.control.Control`): sizes, workers, read rows and counts of each trainer
  - `data`: hash of the data's content, and a record of each file
  - `max_batch_size_given`: `batching.max_batch_size`
  - `loss`, `wall_s`: the last held-out loss, and the seconds so far
  - `config`, `versions`, `devices`: only for people to read
- `manifest.json` (`CheckpointManifest`): round, loss, and size and SHA-256 of each file, because
  Orbax would accept a flipped bit

Frozen weights and data are not in it. It is staged (written to a folder of another name), synced to
disk, renamed to its round's number and read back; then older ones go. Of several processes, each
writes its own shards to a shared file system, and process 0 everything else.

A checkpoint is verified if the size and the hash of each file are those of its manifest; it is
damaged if they are not, or if a file cannot be read. Each step that may fail is made by `_on_all`:
if it fails in one process, it fails in all.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from adloco_jax.data.disk import file_sha256, sync
from adloco_jax.data.formats import Count, Format, checked, read_json
from adloco_jax.errors import CheckpointError, ConfigError, ResourceError, reason, remedy
from adloco_jax.host import processes

FORMAT = 4  # is increased when older versions cannot read a newer run's folder
# The name of a checkpoint that is being written, and the names inside a checkpoint.
_STAGING = ".staging"
_ARRAYS = "arrays"
_HOST = "host.json"
_MANIFEST = "manifest.json"

T = TypeVar("T")


class CheckpointFile(Format):
    """A file of a checkpoint."""

    size: Count
    sha256: str


class Damaged(Exception):
    """Error: a file of a checkpoint is missing or has changed; the message names the file."""


class CheckpointManifest(Format):
    """What `manifest.json` says of a checkpoint."""

    round: Count
    loss: float | None
    files: dict[str, CheckpointFile]


# Errors that mean that a checkpoint cannot be written; Orbax reports a full disk as ValueError.
_FAULTS = (OSError, ValueError, Damaged)


class Saver:
    """Writes the checkpoints of a run on a thread of its own, while the next rounds run."""

    def __init__(self, folder: Path, *, keep: int, on_saved: Callable[[dict], None]):
        """Start the thread that writes; delete an incomplete checkpoint of an earlier process.

        Args:
          folder: Folder of the checkpoints.
          keep: Number of newest checkpoints to keep, besides the one of the lowest loss.
          on_saved: Called on the thread once a checkpoint is complete, with the fields of its line
            in the ledger: `round`, `bytes`, `blocked_s` (the run waited) and `save_s` (in all).
        """
        self.folder = folder
        self._keep = keep
        self._on_saved = on_saved
        # Copies arrays when it is called, and writes the copies on threads of its own.
        self._orbax = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # The last save, until `wait` has told whether it failed.
        self._pending: concurrent.futures.Future[None] | None = None
        if processes.is_first():  # one deletes for all, in the folder that they share
            shutil.rmtree(folder / _STAGING, ignore_errors=True)

    def save(self, round_index: int, arrays: PyTree, host: dict, *, loss: float | None) -> None:
        """Start to write a checkpoint once the last one is complete.

        Returns once Orbax has copied the arrays, whose memory the next round may then reuse; the
        thread writes the copies and the other files. Raises ResourceError if the last save failed
        or this one cannot begin.

        Args:
          round_index: Number of completed rounds, which names the checkpoint.
          arrays: A dataclass of `flax.struct` whose fields are saved, such as `Ensemble`.
          host: Content of `host.json`, as plain JSON.
          loss: Held-out loss after this round; None if it was not measured, or is not finite.
        """
        start_s = time.perf_counter()
        self.wait()
        staging = self.folder / _STAGING
        with self._naming_errors(round_index):
            _on_all("a checkpoint begins", _FAULTS, lambda: self._make_staging(staging))
            saved = ocp.args.StandardSave(_fields(arrays))
            # Orbax accepts only absolute paths.
            self._orbax.save(staging.absolute() / _ARRAYS, args=saved)
        blocked_s = time.perf_counter() - start_s

        def finish() -> None:
            """Complete the checkpoint, on the thread, and call `on_saved` with its ledger line."""
            complete = functools.partial(self._complete, round_index, host, loss)
            with self._naming_errors(round_index):
                wait_for_arrays = self._orbax.wait_until_finished
                _on_all("a checkpoint's arrays are written", _FAULTS, wait_for_arrays)
                size_bytes = _on_all("a checkpoint ends", _FAULTS, complete)
            line = {
                "round": round_index,
                "bytes": size_bytes,
                "blocked_s": round(blocked_s, 4),
                "save_s": round(time.perf_counter() - start_s, 4),
            }
            self._on_saved(line)

        self._pending = self._thread.submit(finish)

    def wait(self, *, only_if_ended: bool = False) -> None:
        """Wait until the last save is verified; raise ResourceError if it failed.

        A failure is raised once: the next call has nothing to wait for. With `only_if_ended`, a
        save that is under way is left to itself.
        """
        pending = self._pending
        if pending is None:
            return
        if only_if_ended and not pending.done():
            return
        self._pending = None
        pending.result()  # waits, and raises the save's error

    def close(self) -> None:
        """Wait until the last save has ended, and end the thread; its failure is not raised."""
        self._thread.shutdown()
        self._orbax.close()

    @contextlib.contextmanager
    def _naming_errors(self, round_index: int) -> Iterator[None]:
        """Turn an error of a save in the `with` block into a ResourceError with the checkpoint.

        Such errors are OSError, ValueError (Orbax's for a full disk) and Damaged; others pass.
        """
        try:
            yield
        except _FAULTS as error:
            raise ResourceError(
                f"{self.folder / str(round_index)}: the checkpoint cannot be written"
                f" ({reason(error)}); {remedy(error)}"
            ) from error

    def _make_staging(self, staging: Path) -> None:
        """Make the empty folder in which a checkpoint is written; only process 0 does.

        Raises OSError if it cannot be made.
        """
        if processes.is_first():
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    def _complete(self, round_index: int, host: dict, loss: float | None) -> int:
        """Write the other files of a checkpoint whose arrays are written, and rename its folder.

        The arguments are those of `save`. Then it is read back, and old checkpoints are deleted.
        Only process 0 does all this. Returns the bytes of the files; in other processes 0. Raises
        OSError if a file cannot be written, Damaged if what is read back is not what was written.
        """
        if not processes.is_first():
            return 0
        staging = self.folder / _STAGING
        target = self.folder / str(round_index)
        # Written and brought to disk (`sync`) in this order: all files, the manifest, the name. So
        # a folder with a round's name is whole, whenever the power fails.
        (staging / _HOST).write_bytes(_encode(host))
        files = _describe_files(staging)
        for path in [*staging.rglob("*"), staging]:
            sync(path)
        manifest = CheckpointManifest(round=round_index, loss=loss, files=files)
        content = {"format": FORMAT, **manifest.model_dump()}
        (staging / _MANIFEST).write_bytes(_manifest_bytes(content))
        sync(staging / _MANIFEST)
        sync(staging)
        os.rename(staging, target)
        sync(self.folder)
        verify(target)
        self._delete_old()
        return sum(file.size for file in files.values())

    def _delete_old(self) -> None:
        """Delete old checkpoints: keep the newest ones, and the one with the lowest loss.

        Raises OSError if one cannot be deleted.
        """
        losses: dict[int, float | None] = {}  # by round, the newest first; None: not measured
        for number in list_rounds(self.folder):
            with contextlib.suppress(Damaged):  # a damaged one is neither counted nor deleted
                losses[number] = read_manifest(self.folder / str(number)).loss
        kept = list(losses)[: self._keep]
        measured = [(loss, number) for number, loss in losses.items() if loss is not None]
        if measured:
            _, best = min(measured)  # of equal losses, the earlier round
            kept.append(best)
        for number in losses:
            if number in kept:
                continue
            # Renamed first: what is left if the process is killed now is no damaged checkpoint.
            os.rename(self.folder / str(number), self.folder / _STAGING)
            shutil.rmtree(self.folder / _STAGING)


def list_rounds(folder: Path) -> list[int]:
    """Return the rounds of the checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    rounds = []
    for entry in os.scandir(folder):
        name = entry.name
        # A checkpoint has the name that `Saver` gives it: "12", not "012" or "12.damaged".
        if entry.is_dir() and name.isdecimal() and name == str(int(name)):
            rounds.append(int(name))
    return sorted(rounds, reverse=True)


def describe_newest(folder: Path) -> str:
    """Name the newest checkpoint in a folder, or say that there is none, for a message."""
    rounds = list_rounds(folder)
    if not rounds:
        return "none was saved"
    newest_round = rounds[0]
    return f"the last checkpoint is {folder / str(newest_round)}"


def verify(checkpoint: Path) -> CheckpointManifest:
    """Compare a checkpoint's files with its manifest, and return the manifest.

    Raises Damaged if a file is missing, unreadable, changed, or not in the manifest, or the
    manifest itself is damaged; CheckpointError if the checkpoint was written in another format.
    """
    manifest = read_manifest(checkpoint)
    expected = manifest.files
    found = _describe_files(checkpoint)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise Damaged(f"{checkpoint / name}: missing, changed, or not in the manifest")
    return manifest


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest, without a look at the files that it describes.

    The manifest file is JSON. Its key `sha256` has the hash of all the rest, which is compared.
    `checkpoint` is the folder, whose name is the number of its round.

    Raises:
      Damaged: If the manifest is missing, unreadable or changed, is that of another round, or the
        checkpoint is a symbolic link.
      CheckpointError: If the checkpoint was written in another format.
    """
    path = checkpoint / _MANIFEST
    if checkpoint.is_symlink():  # a run makes none, so this may be another run's checkpoint
        raise Damaged(f"{checkpoint}: a symbolic link, not a folder of this run")
    content = read_json(path, Damaged)
    content.pop("sha256", None)  # is not part of what it is the hash of
    # Encoded again with its hash, an unchanged content gives the bytes of the file.
    if path.read_bytes() != _manifest_bytes(content):
        raise Damaged(f"{path}: does not match its own hash")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint}: written in format {content.get('format')}, this version reads format"
            f" {FORMAT}; use the version of adloco_jax that wrote it"
        )
    manifest = checked(content, CheckpointManifest, str(path), Damaged)
    if manifest.round != int(checkpoint.name):
        raise Damaged(f"{path}: not the manifest of round {checkpoint.name}")
    return manifest


def read_newest(folder: Path, read: Callable[[Path], T]) -> tuple[T, list[str]] | None:
    """Read the newest undamaged checkpoint, and rename the damaged ones that are newer.

    Args:
      folder: Folder of the checkpoints.
      read: Reads a verified checkpoint, given its folder; raises Damaged if it is not usable.

    Returns:
      What `read` returned, and a line on each damaged checkpoint; None if there are no checkpoints.

    Raises:
      CheckpointError: If all are damaged (then none is renamed), or one has another format.
      Exception: What else `read` raises.
    """
    damage = []
    # Process 0 lists the checkpoints and compares the hashes, which takes long and need not be done
    # in each process; then all processes read the same checkpoint.
    rounds = processes.broadcast(list_rounds(folder))
    check = verify if processes.is_first() else read_manifest
    for index, number in enumerate(rounds):
        path = folder / str(number)
        try:
            _on_all("a checkpoint's files", Damaged, functools.partial(check, path))
            content = _on_all("a checkpoint's content", Damaged, functools.partial(read, path))
        except Damaged as error:
            damage.append(str(error))
            continue
        if processes.is_first():
            # Out of the way: the run goes on from here, and will save these rounds again.
            for damaged in rounds[:index]:
                aside = folder / f"{damaged}.damaged"
                while aside.exists():  # from an earlier restore
                    aside = aside.with_name(aside.name + "+")
                os.rename(folder / str(damaged), aside)
        return content, damage
    if damage:
        raise CheckpointError(
            "\n".join([*damage, f"{folder}: no checkpoint is whole; restore one from a copy"])
        )
    return None


def read_host(checkpoint: Path) -> dict:
    """Read the part of a verified checkpoint that is not in arrays (`host.json`).

    Raises Damaged if it is missing or no JSON.
    """
    return read_json(checkpoint / _HOST, Damaged)


def read_arrays(checkpoint: Path, template: PyTree) -> PyTree:
    """Read a verified checkpoint's arrays as the template's shapes, dtypes, shardings say.

    `template` is a dataclass such as `Ensemble`, with descriptions in place of arrays; the result
    is the same with arrays. Raises ConfigError if the saved arrays do not have its structure,
    shapes and dtypes; Damaged if they cannot be read.
    """
    return dataclasses.replace(template, **_read_fields(checkpoint, _fields(template)))


def read_field(checkpoint: Path, name: str, template: PyTree) -> PyTree:
    """Read one field of the saved dataclass, such as `params_M`, as the template says.

    Raises ConfigError if the saved arrays do not have the template's structure, shapes and dtypes;
    Damaged if they cannot be read.
    """
    return _read_fields(checkpoint, {name: template}, partial=True)[name]


def _read_fields(
    checkpoint: Path, expected: dict[str, PyTree], *, partial: bool = False
) -> dict[str, PyTree]:
    """Read arrays of a checkpoint: all fields of the saved dataclass, or with `partial` some.

    `expected` has the templates of the fields to read, by their names: shape, dtype and sharding of
    each array. Raises ConfigError if the saved arrays have another structure, shape or dtype, or
    without `partial` if there are others; Damaged if they cannot be read.
    """
    arrays = checkpoint.absolute() / _ARRAYS
    # Each process reads by itself: in a joint read, the others would wait for one that failed.
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with contextlib.closing(ocp.Checkpointer(handler, multiprocessing_options=alone)) as reader:
        try:
            # Shapes are compared first, so that arrays of a wrong size are not read into memory.
            metadata = reader.metadata(arrays).item_metadata
            stored = shapes(metadata)
            wanted = shapes(expected)
            names = set(wanted)  # paths of arrays, such as params_M/decoder/0/kernel
            if not partial:
                names.update(stored)
            for name in sorted(names):
                if stored.get(name) != wanted.get(name):
                    field, _, _ = name.partition("/")
                    raise ConfigError(
                        f"{checkpoint}: of another {_SHAPED_BY.get(field, 'model')}: {name} is"
                        f" {stored.get(name, 'missing')} there, {wanted.get(name, 'missing')}"
                        " here; give what the run began with, or name another folder"
                    )
            # The dtype and the sharding with which each array is read.
            restore_args = ocp.checkpoint_utils.construct_restore_args(expected)
            args = ocp.args.PyTreeRestore(
                expected, restore_args=restore_args, partial_restore=partial
            )
            return reader.restore(arrays, args=args)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise Damaged(f"{arrays}: unreadable ({reason(error)})") from error


# What determines the shapes of a field of the ensemble; of others the model.
_SHAPED_BY = {"inner_state_R": "inner optimizer", "outer_state_M": "outer optimizer"}


def shapes(tree: PyTree) -> dict[str, str]:
    """Return dtype and shape of every leaf, such as `float32[3, 4]`, by its path of keys."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = f"{leaf.dtype}{list(leaf.shape)}"
    return found


def _fields(state: PyTree) -> dict[str, PyTree]:
    """Return the fields of a `flax.struct` dataclass that hold arrays, by name.

    Left out are fields that are None, and those that hold other data, such as `Ensemble.sizes`.
    """
    arrays = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        # `flax.struct` marks a field that JAX does not see as arrays.
        is_static = not field.metadata.get("pytree_node", True)
        if value is not None and not is_static:
            arrays[field.name] = value
    return arrays


def _describe_files(folder: Path) -> dict[str, CheckpointFile]:
    """Return size and hash of each file of a checkpoint, except the manifest, by its path.

    Raises Damaged if a file cannot be read.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path != folder / _MANIFEST:
            try:
                digest = file_sha256(path)
                size = path.stat().st_size
            except OSError as error:
                raise Damaged(f"{path}: unreadable ({error.strerror})") from error
            found[path.relative_to(folder).as_posix()] = CheckpointFile(size=size, sha256=digest)
    return found


def _manifest_bytes(manifest: dict) -> bytes:
    """Return the bytes of a manifest file: the manifest as JSON, and the hash of the manifest."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return _encode(manifest | {"sha256": digest})


def _encode(content: dict) -> bytes:
    """Return the content of a JSON file as its bytes; the same content has the same bytes."""
    return (json.dumps(content, indent=1) + "\n").encode()


def _on_all(name: str, faults: type[Exception] | tuple[type, ...], act: Callable[[], T]) -> T:
    """Run `act`, a part of a save or a restore, in every process, and return its result.

    The processes tell each other whether it failed, so that none waits for one that did. A process
    in which it raises one of `faults` raises that error, and the others raise Damaged. The name
    tells this exchange from those of other threads of a process, which must have others.
    """
    return processes.run_on_all(act, name=name, faults=faults, elsewhere=Damaged)
