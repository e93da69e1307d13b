"""Checkpoint folders: complete or reported as damaged, kept and deleted by rule, never trusted."""

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax.errors import CheckpointError, ConfigError, ResourceError
from adloco_jax.host import processes
from adloco_jax.run.kept import checkpoint
from adloco_jax.run.kept.checkpoint import (
    Damaged,
    Saver,
    list_rounds,
    read_arrays,
    read_newest,
    verify,
)
from probes import crashes


@flax.struct.dataclass
class Arrays:
    w: jax.Array
    n: jax.Array
    sizes: tuple = flax.struct.field(pytree_node=False, default=())
    absent: jax.Array | None = None


ARRAYS = Arrays(np.arange(12, dtype=np.float32).reshape(3, 4), np.int32(7))


def save(folder, *rounds, keep=2, losses=None):
    with contextlib.closing(Saver(folder, keep=keep, on_saved=lambda _: None)) as writer:
        for number in rounds:
            arrays = jax.tree.map(lambda leaf, number=number: jnp.asarray(leaf + number), ARRAYS)
            writer.save(number, arrays, {"at": number}, loss=(losses or {}).get(number))
        writer.wait()


def template(arrays=ARRAYS):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=place), arrays
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with the checkpoint of round 3; tests must not change it."""
    folder = tmp_path_factory.mktemp("good")
    save(folder, 3)
    return folder


@pytest.fixture
def path(good, tmp_path):
    """A copy of that checkpoint, which a test may damage."""
    return shutil.copytree(good / "3", tmp_path / "3")


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def reseal(path, change):
    """Changes a manifest and updates its hash, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    change(manifest)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    sealed = json.dumps(manifest | {"sha256": digest}, indent=1) + "\n"
    (path / "manifest.json").write_text(sealed)


def fail_at(monkeypatch, point):
    crashes.install(point, lambda: crashes.fail("ENOSPC"), patch=monkeypatch.setattr)


def test_a_saved_state_is_restored_though_its_arrays_are_donated_at_once(tmp_path):
    arrays = jax.tree.map(jnp.asarray, ARRAYS)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    events = []
    with contextlib.closing(Saver(tmp_path, keep=2, on_saved=events.append)) as writer:
        writer.save(5, arrays, {"at": 5}, loss=1.5)
        jax.block_until_ready(step(arrays))
        writer.wait()
    manifest = verify(tmp_path / "5")
    assert (manifest.round, manifest.loss, events[0]["round"]) == (5, 1.5, 5)
    assert events[0]["bytes"] == sum(f.size for f in manifest.files.values())
    back = read_arrays(tmp_path / "5", template())
    assert back.n == 7 and back.n.dtype == np.int32 and back.absent is None
    np.testing.assert_array_equal(back.w, ARRAYS.w)
    assert checkpoint.read_host(tmp_path / "5") == {"at": 5}


def test_the_newest_and_the_best_are_kept_in_the_order_of_their_rounds(tmp_path):
    for name in ("7.orbax-checkpoint-tmp", "010"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path, 7, 8, 9, 10, losses={7: 3.0, 8: 1.0, 9: 2.0, 10: 1.5})
    assert list_rounds(tmp_path) == [10, 9, 8]
    os.utime(tmp_path / "10", (0, 0))
    save(tmp_path, 11, keep=1)
    assert list_rounds(tmp_path) == [11, 8]
    assert {p.name for p in tmp_path.iterdir()} >= {"notes.txt", "7.orbax-checkpoint-tmp", "010"}


def test_a_first_save_that_fails_leaves_no_trace(tmp_path, monkeypatch):
    fail_at(monkeypatch, "save.manifest")
    with pytest.raises(ResourceError, match="1: the checkpoint cannot be written .*; make room"):
        save(tmp_path, 1)
    save(tmp_path, 1)
    assert {p.name for p in tmp_path.iterdir()} == {"1"}


def test_damage_to_any_file_is_found_and_named(good, path):
    for file in files_of(path):
        content, middle = file.read_bytes(), file.stat().st_size // 2
        damaged = [content + b"\0", None, file.relative_to(path)]
        if content:  # an empty file is Orbax's mark of success
            flipped = bytes([content[middle] ^ 1])
            damaged += [content[:-1], content[:middle] + flipped + content[middle + 1 :]]
        for new in damaged:  # extended, deleted, a link, cut, flipped
            file.unlink()
            if isinstance(new, bytes):
                file.write_bytes(new)
            elif new is not None:
                file.symlink_to(good / "3" / new)
            with pytest.raises(Damaged, match=file.name):
                verify(path)
            file.unlink(missing_ok=True)
            file.write_bytes(content)
    verify(path)


def test_the_newest_complete_one_is_read_and_damaged_ones_set_aside(tmp_path):
    save(tmp_path, 1, 2, 3, keep=3)
    (tmp_path / "3" / "host.json").write_text("{}")
    found, damage = read_newest(tmp_path, checkpoint.read_host)
    assert found == {"at": 2} and len(damage) == 1 and "3/host.json" in damage[0]
    assert list_rounds(tmp_path) == [2, 1] and (tmp_path / "3.damaged").is_dir()
    save(tmp_path, 3, keep=3)  # the name can be used again
    assert read_newest(tmp_path, checkpoint.read_host) == ({"at": 3}, [])


def test_if_all_are_damaged_nothing_is_touched(path, good):
    folder = path.parent
    shutil.copytree(good / "3", folder / "4")
    (path / "manifest.json").unlink()
    before = files_of(folder)
    with pytest.raises(CheckpointError, match="no checkpoint is whole") as error:
        read_newest(folder, checkpoint.read_host)
    assert "3/manifest.json" in str(error.value) and "4/manifest.json" in str(error.value)
    assert error.value.exit_code == 3 and files_of(folder) == before
    assert read_newest(folder / "none", checkpoint.read_host) is None


def test_a_newer_format_is_named_and_no_older_checkpoint_used(path, good):
    shutil.copytree(good / "3", path.parent / "4")
    reseal(path.parent / "4", lambda manifest: manifest.update(format=5, round=4))
    with pytest.raises(CheckpointError, match="written in format 5, this version reads format 4"):
        read_newest(path.parent, checkpoint.read_host)


@pytest.mark.parametrize("files", [{"../../outside": {"size": 1, "sha256": "0"}}, []])
def test_a_forged_manifest_opens_nothing_outside_its_folder(path, files):
    reseal(path, lambda manifest: manifest.update(files=files))
    with pytest.raises(Damaged):
        verify(path)


def test_the_records_of_a_hundred_thousand_files_can_be_read_back(tmp_path):
    record = {"name": "0123456789_7.txt", "bytes": 1000, "sha256": "0" * 64, "rows": 1}
    (tmp_path / "host.json").write_text(json.dumps({"shards": [record] * 100_000}, indent=1))
    assert len(checkpoint.read_host(tmp_path)["shards"]) == 100_000


def test_arrays_of_another_shape_are_refused_before_they_are_read(good):
    other = template()
    w = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32, sharding=other.w.sharding)
    with pytest.raises(ConfigError, match=r"w is float32\[3, 4\] there, float32\[1048576, 10"):
        read_arrays(good / "3", other.replace(w=w))
    with pytest.raises(ConfigError, match="of another model: .* there, missing here; "):
        read_arrays(good / "3", other.replace(w=None))


@pytest.mark.parametrize("size", [2**62, -4])
def test_forged_shapes_take_no_memory(path, size):
    for file in files_of(path / "arrays"):
        if b"write_shape" in file.read_bytes():
            file.write_text(re.sub(r"\[3, 4\]", f"[{size}, 4]", file.read_text()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(Damaged, ConfigError):
        np.testing.assert_array_equal(read_arrays(path, template()).w, ARRAYS.w + 3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


@pytest.mark.parametrize("point", ["save.begin", "save.arrays", "save.committed"])
def test_a_save_that_fails_says_so_and_keeps_the_one_before(tmp_path, monkeypatch, point):
    save(tmp_path, 1)
    fail_at(monkeypatch, point)
    with pytest.raises(ResourceError, match="2: the checkpoint cannot be written .*No space left"):
        save(tmp_path, 2)
    assert verify(tmp_path / "1").round == 1
    save(tmp_path, 3)  # another attempt succeeds
    assert list_rounds(tmp_path)[0] == 3


def test_a_save_reads_back_what_the_disk_has_kept(tmp_path, monkeypatch):
    def lose():
        (tmp_path / "2" / "host.json").write_text("{}")

    save(tmp_path, 1)
    crashes.install("save.committed", lose, patch=monkeypatch.setattr)
    with pytest.raises(ResourceError, match="2: the checkpoint cannot be written .*host.json"):
        save(tmp_path, 2, keep=1)
    assert verify(tmp_path / "1").round == 1


@pytest.mark.parametrize("part", ["begins", "arrays", "ends"])
def test_a_save_that_fails_in_another_process_has_failed_here(tmp_path, monkeypatch, part):
    save(tmp_path, 1)

    def gather(report, name="gather"):
        return [report, ["OSError", "no room"] if part in name else None]

    monkeypatch.setattr(processes, "gather", gather)
    saved = []
    with contextlib.closing(Saver(tmp_path, keep=2, on_saved=saved.append)) as writer:
        with pytest.raises(ResourceError, match="2: the checkpoint .*process 1: no room"):
            writer.save(2, jax.tree.map(jnp.asarray, ARRAYS), {}, loss=None)
            writer.wait()
    assert saved == []


def test_what_another_process_cannot_read_is_damage_for_all(path, good, monkeypatch):
    shutil.copytree(good / "3", path.parent / "4")
    reseal(path.parent / "4", lambda manifest: manifest.update(round=4))
    contents = []

    def gather(value, name="gather"):
        if name != "a checkpoint's content":
            return [value, value]
        contents.append(name)
        return [value, ["Damaged", "unreadable"] if len(contents) == 1 else None]

    monkeypatch.setattr(processes, "gather", gather)
    read, damage = read_newest(path.parent, lambda path: path.name)
    assert (read, damage) == ("3", ["process 1: unreadable"])
    assert list_rounds(path.parent) == [3]
