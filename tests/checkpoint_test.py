"""Checkpoint folders: whole or named as damaged, kept and deleted by rule, never trusted."""

import collections
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax.errors import CheckpointError, ResourceError
from adloco_jax.run import checkpoint, crashpoints, processes
from adloco_jax.run.checkpoint import Damaged, Saver, list_rounds, newest, read_arrays, verify

TREE = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.int32(7)}


def saver(folder, keep=2, told=None):
    return Saver(folder, keep=keep, on_saved=(told if told is not None else []).append)


def save(folder, *rounds, keep=2, losses=None):
    told = []
    with contextlib.closing(saver(folder, keep, told)) as writer:
        for number in rounds:
            arrays = {name: jnp.asarray(leaf + number) for name, leaf in TREE.items()}
            writer.save(number, arrays, {"at": number}, loss=(losses or {}).get(number))
        writer.wait()
    return told


def template():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=place), TREE
    )


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def reseal(path, change):
    """Changes a manifest and gives it the hash that fits, as someone who means harm would."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    change(manifest)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    sealed = json.dumps(manifest | {"sha256": digest}, indent=1) + "\n"
    (path / "manifest.json").write_text(sealed)


def test_what_is_saved_comes_back(tmp_path):
    (saved,) = save(tmp_path, 5, losses={5: 1.5})
    manifest = verify(tmp_path / "5")
    assert (manifest["round"], manifest["loss"], saved.round) == (5, 1.5, 5)
    assert saved.size_bytes == sum(f["size"] for f in manifest["files"].values())
    back = read_arrays(tmp_path / "5", template())
    assert back["n"] == 12 and back["n"].dtype == np.int32
    np.testing.assert_array_equal(back["w"], TREE["w"] + 5)
    assert checkpoint.read_host(tmp_path / "5") == {"at": 5}


def test_the_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    writer = saver(tmp_path)
    arrays = {"w": jnp.arange(2.0**20)}
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    writer.save(1, arrays, {}, loss=None)
    jax.block_until_ready(step(arrays))
    writer.wait()
    writer.close()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    back = read_arrays(
        tmp_path / "1", {"w": jax.ShapeDtypeStruct((2**20,), jnp.float32, sharding=place)}
    )
    np.testing.assert_array_equal(back["w"], np.arange(2.0**20))


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 5: 1.5}
    save(tmp_path, 1, 2, 3, 4, 5, 6, losses=losses)
    assert list_rounds(tmp_path) == [6, 5, 2]
    save(tmp_path, 7, keep=1)
    assert list_rounds(tmp_path) == [7, 2]


def test_order_is_by_round_and_foreign_files_stay(tmp_path):
    for name in ("notes.txt", "7.orbax-checkpoint-tmp", "010"):
        (tmp_path / name).mkdir(parents=True) if name != "notes.txt" else None
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path, 9, 10, keep=1)
    os.utime(tmp_path / "10", (0, 0))
    save(tmp_path, 11, keep=1)
    assert list_rounds(tmp_path) == [11]
    assert {p.name for p in tmp_path.iterdir()} >= {"notes.txt", "7.orbax-checkpoint-tmp", "010"}


@pytest.mark.parametrize("place", ["save.arrays", "save.synced", "save.renamed", "save.committed"])
@pytest.mark.parametrize(
    "before, left, advice",
    [
        ((), (), "none was saved before it; run the same command again, which starts over"),
        ((1, 2), (), "those before are gone; restore them from a copy, or name another folder"),
        ((1, 2), (1,), "the one before it is FOLDER/1; run the same command again"),
    ],
)
def test_checkpoints_deleted_while_one_is_written_are_said_as_they_are(
    tmp_path, monkeypatch, place, before, left, advice
):
    folder = tmp_path / "checkpoints"
    save(folder, *before)

    def delete(name):
        if name == place:
            for path in folder.iterdir():
                if path.name not in map(str, left):
                    shutil.rmtree(path)

    monkeypatch.setattr(checkpoint, "hit", delete)
    with pytest.raises(CheckpointError) as refusal:
        save(folder, 3)
    assert refusal.value.exit_code == 3
    expected = f"{folder / '3'}: deleted while it was written; {advice}"
    assert str(refusal.value).startswith(expected.replace("FOLDER", str(folder)))


def test_a_first_save_that_fails_claims_no_older_one(tmp_path, monkeypatch):
    monkeypatch.setattr(crashpoints, "_arrivals", collections.Counter())
    monkeypatch.setenv("ADLOCO_FAIL_AT", "save.manifest:1:ENOSPC")
    with pytest.raises(ResourceError, match="none was saved before it; make room, and run"):
        save(tmp_path, 1)


def test_a_save_that_was_cut_short_leaves_no_trace_in_the_next(tmp_path):
    (tmp_path / ".staging" / "arrays").mkdir(parents=True)
    save(tmp_path, 1)
    assert {p.name for p in tmp_path.iterdir()} == {"1"}


@pytest.mark.parametrize("fault", ["flip", "truncate", "empty", "append", "delete", "link"])
def test_damage_to_any_file_is_found_and_named(tmp_path, fault):
    save(tmp_path / "good", 3)
    for file in files_of(tmp_path / "good" / "3"):
        name = file.relative_to(tmp_path / "good" / "3")
        path = tmp_path / "bad" / "3"
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good" / "3", path)
        content = file.read_bytes()
        if not content and fault in ("flip", "truncate", "empty"):
            continue  # Orbax marks a success with an empty file
        if fault == "flip":
            middle = len(content) // 2
            changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            (path / name).write_bytes(changed)
        elif fault in ("truncate", "empty"):
            (path / name).write_bytes(content[:-1] if fault == "truncate" else b"")
        elif fault == "append":
            (path / name).write_bytes(content + b"\0")
        else:
            (path / name).unlink()
            if fault == "link":
                (path / name).symlink_to(file)
        with pytest.raises(Damaged, match=str(name)):
            verify(path)


def test_a_file_that_does_not_belong_is_damage(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "3" / "arrays" / "state.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(Damaged, match="state.pkl: not in the manifest"):
        verify(tmp_path / "3")


def test_two_files_swapped_are_damage(tmp_path):
    save(tmp_path, 3)
    first, second = files_of(tmp_path / "3" / "arrays" / "ocdbt.process_0" / "d")[:2]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other), second.write_bytes(one)
    with pytest.raises(Damaged):
        verify(tmp_path / "3")


def test_a_renamed_checkpoint_is_damage(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "3").rename(tmp_path / "8")
    with pytest.raises(Damaged, match="not the manifest of round 8"):
        verify(tmp_path / "8")


def test_the_newest_whole_one_is_read_and_damaged_ones_set_aside(tmp_path):
    save(tmp_path, 1, 2, 3, keep=3)
    (tmp_path / "3" / "host.json").write_text("{}")
    found, damage = newest(tmp_path, checkpoint.read_host)
    assert found == {"at": 2} and len(damage) == 1 and "3/host.json" in damage[0]
    assert list_rounds(tmp_path) == [2, 1] and (tmp_path / "3.damaged").is_dir()
    save(tmp_path, 3, keep=3)  # its name is free again
    assert newest(tmp_path, checkpoint.read_host) == ({"at": 3}, [])


def test_where_all_are_damaged_nothing_is_touched(tmp_path):
    save(tmp_path, 1, 2)
    for number in (1, 2):
        (tmp_path / str(number) / "manifest.json").unlink()
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint is whole") as error:
        newest(tmp_path, checkpoint.read_host)
    assert "1/manifest.json" in str(error.value) and "2/manifest.json" in str(error.value)
    assert error.value.exit_code == 3 and files_of(tmp_path) == before
    assert newest(tmp_path / "none", checkpoint.read_host) is None


def test_a_newer_format_is_named_and_not_fallen_back_from(tmp_path):
    save(tmp_path, 1, 2)
    reseal(tmp_path / "2", lambda manifest: manifest.update(format=3))
    with pytest.raises(CheckpointError, match="written in format 3, this version reads format 2"):
        newest(tmp_path, checkpoint.read_host)


@pytest.mark.parametrize(
    "files",
    [
        {"../../outside": {"size": 1, "sha256": "0"}},
        {"/etc/hostname": {"size": 1, "sha256": "0"}},
        {"a\0b": {"size": 1, "sha256": "0"}},
        {"host.json": {"size": -1, "sha256": "0"}},
        {"host.json": 5},
        [],
        None,
    ],
)
def test_a_forged_manifest_opens_nothing_outside_its_folder(tmp_path, files):
    save(tmp_path, 1)
    reseal(tmp_path / "1", lambda manifest: manifest.update(files=files))
    with pytest.raises(Damaged):
        verify(tmp_path / "1")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, json.dumps({str(i): 0 for i in range(10**6)}), "{", "[]", "null", "\xff"],
    ids=["deep", "wide", "cut", "list", "null", "latin"],
)
@pytest.mark.parametrize("name", ["manifest.json", "host.json"])
def test_strange_json_is_damage(tmp_path, name, text):
    save(tmp_path, 1)
    (tmp_path / "1" / name).write_text(text, encoding="latin-1")
    read = checkpoint.read_host if name == "host.json" else checkpoint.read_manifest
    with pytest.raises(Damaged, match=name):
        read(tmp_path / "1")


def test_arrays_of_another_shape_are_refused_before_they_are_read(tmp_path):
    save(tmp_path, 1)
    other = template()
    other["w"] = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32, sharding=other["w"].sharding)
    with pytest.raises(
        Damaged, match=r"w is float32\[3, 4\], expected float32\[1048576, 1048576\]"
    ):
        read_arrays(tmp_path / "1", other)
    del other["w"]
    with pytest.raises(Damaged, match="expected None"):
        read_arrays(tmp_path / "1", other)


@pytest.mark.parametrize("size", [2**62, -4, 0])
def test_forged_shapes_take_no_memory(tmp_path, size):
    save(tmp_path, 1)
    for file in (tmp_path / "1" / "arrays").rglob("*"):
        if file.is_file() and b"write_shape" in file.read_bytes():
            file.write_text(re.sub(r"\[3, 4\]", f"[{size}, 4]", file.read_text()))
            name = file.relative_to(tmp_path / "1").as_posix()
            content = file.read_bytes()
            sealed = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            reseal(tmp_path / "1", lambda m, n=name, f=sealed: m["files"].update({n: f}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(Damaged):
        np.testing.assert_array_equal(read_arrays(tmp_path / "1", template())["w"], TREE["w"] + 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


@pytest.mark.parametrize(
    "point", ["save.begin", "save.arrays", "save.host", "save.manifest", "save.committed"]
)
def test_a_save_that_fails_says_so_and_leaves_the_one_before(tmp_path, monkeypatch, point):
    save(tmp_path, 1)
    monkeypatch.setattr(crashpoints, "_arrivals", collections.Counter())
    monkeypatch.setenv("ADLOCO_FAIL_AT", f"{point}:1:ENOSPC")
    with pytest.raises(ResourceError, match="2: the checkpoint cannot be written .*No space left"):
        save(tmp_path, 2)
    assert verify(tmp_path / "1")["round"] == 1
    monkeypatch.delenv("ADLOCO_FAIL_AT")
    save(tmp_path, 3)  # another attempt goes through
    assert list_rounds(tmp_path)[0] == 3


def test_a_save_reads_back_what_the_disk_has_kept(tmp_path, monkeypatch):
    def lose(point):
        if point == "save.committed":
            (tmp_path / "2" / "host.json").write_text("{}")

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "hit", lose)
    with pytest.raises(ResourceError, match="2: the checkpoint cannot be written .*host.json"):
        save(tmp_path, 2, keep=1)
    assert verify(tmp_path / "1")["round"] == 1


@pytest.mark.parametrize("part", ["begins", "arrays", "ends"])
def test_a_save_that_fails_in_another_process_has_failed_here(tmp_path, monkeypatch, part):
    told = save(tmp_path, 1)
    monkeypatch.setattr(
        processes, "tell", lambda name, text: [text, "no room" if part in name else ""]
    )
    with contextlib.closing(saver(tmp_path, told=told)) as writer:
        with pytest.raises(ResourceError, match="2: the checkpoint .*process 1: no room"):
            writer.save(2, {"w": jnp.zeros(3)}, {}, loss=None)
            writer.wait()
    assert [saved.round for saved in told] == [1]


def test_what_another_process_cannot_read_is_damage_for_all(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    asked = []

    def tell(name, text):
        asked.append(name)
        return [text, "unreadable" if len(asked) == 2 else ""]  # the newer one's content

    monkeypatch.setattr(processes, "tell", tell)
    read, damage = newest(tmp_path, lambda path: path.name)
    assert (read, damage) == ("1", ["process 1: unreadable"])
    assert list_rounds(tmp_path) == [1]
