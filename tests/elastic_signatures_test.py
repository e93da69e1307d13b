"""With ADLOCO_KEY, only objects of who has the key exist for driver and learners."""

import json

import pytest
from elastic_attack_test import settings_with, with_request
from learners import InBucket
from toy_runs import events, run

from adloco_jax import main as cli
from adloco_jax.elastic import bucket_learner, store
from adloco_jax.elastic.formats import DriverHeartbeat, Refused, RunDescription
from adloco_jax.errors import ConfigError
from probes import runs

pytestmark = pytest.mark.usefixtures("one_device")

KEY, NAME = "k" * 32, "driver/2.json"


def opened(monkeypatch, folder, *, key=KEY, run="a"):
    monkeypatch.setenv("ADLOCO_KEY", key)
    there = store.at(f"file://{folder}/bucket")
    there.signatures.run = run
    return there


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ({"key": ""}, NAME),
        ({"key": "l" * 32}, NAME),
        ({"run": "b"}, NAME),
        ({}, "driver/1.json"),
        ({}, "learners/2/0-0.json"),
    ],
    ids=["unsigned", "another key", "another run", "another generation", "another name"],
)
def test_what_is_not_signed_for_its_place_does_not_exist(monkeypatch, tmp_path, how, name):
    other, heartbeat = opened(monkeypatch, tmp_path, **how), DriverHeartbeat(count=7)
    other.put(name, store.to_json(heartbeat))
    folder = tmp_path / "bucket"
    (folder / NAME).parent.mkdir(exist_ok=True)
    (folder / name).rename(folder / NAME)
    there = opened(monkeypatch, tmp_path)
    with pytest.raises(Refused, match="^driver/2.json: not signed with this ADLOCO_KEY$"):
        there.get(NAME)
    assert there.valid(NAME, DriverHeartbeat) is None
    there.put(NAME, store.to_json(heartbeat))
    assert there.valid(NAME, DriverHeartbeat) == heartbeat
    signed = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(signed.replace(b'"count": 7', b'"count": 8'))
    assert there.valid(NAME, DriverHeartbeat) is None


def test_forged_requests_and_responses_are_one_refusal_each_and_cost_a_round(
    monkeypatch, tmp_path, capfd
):
    monkeypatch.setenv("ADLOCO_KEY", KEY)
    there, put = InBucket(monkeypatch, tmp_path / "bucket"), store.Store.put

    def putting(self, name, data):
        put(self, name, data)
        if name == "requests/1/1-0/2.safetensors":  # which fits its own SHA-256
            (tmp_path / "bucket" / name).write_bytes(with_request(data, {"work.start": 0}))
        if name == "responses/1/1-0/4.safetensors":
            (tmp_path / "bucket" / name).write_bytes(data)

    monkeypatch.setattr(store.Store, "put", putting)
    run(tmp_path / "run", settings_with(5, kind="bucket", address=there.url))
    assert [e["workers_counted"] for e in events(tmp_path / "run", "round")] == [2, 1, 2, 1, 2]
    found = [e for e in events(tmp_path / "run", "learner") if e["what"] != "joined"]
    assert [(e["what"], e["learner"]) for e in found] == [("refused", 1)] * 2
    assert all("not signed with this ADLOCO_KEY" in e["why"] for e in found)
    assert runs.audit(tmp_path / "run") == []
    assert "objects are signed: learners need this ADLOCO_KEY\n" in capfd.readouterr().out


def test_who_has_no_key_or_another_one_is_told_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(store, "READ_PAUSES_S", ())
    about = RunDescription(id="a", adloco_jax="1", fingerprint="a", commit="", settings={})
    for key, other, why in [
        (KEY, "", "run.json: signed; set ADLOCO_KEY to the key of the run"),
        ("", KEY, "run.json: not signed with this ADLOCO_KEY"),
        (KEY, "l" * 32, "run.json: not signed with this ADLOCO_KEY"),
    ]:
        opened(monkeypatch, tmp_path, key=key).put("run.json", store.to_json(about))
        monkeypatch.setenv("ADLOCO_KEY", other)
        url = f"file://{tmp_path}/bucket"
        with pytest.raises(ConfigError, match=f"{why}$"):
            bucket_learner.join(url, own={})
        with pytest.raises(ConfigError, match=f"{why}, or name another prefix$"):
            run(tmp_path / "run", settings_with(1, kind="bucket", address=url))
    assert str(opened(monkeypatch, tmp_path, key="").signatures).startswith(
        "objects are not signed: whoever can write to the bucket can steer learners"
    )
    with pytest.raises(ConfigError, match="ADLOCO_KEY: has 5 characters, expected at least 32"):
        opened(monkeypatch, tmp_path, key="short")
    assert cli.main(["key"]) == 0
    key = capsys.readouterr().out.split()[-1]
    assert len(key) == 64 and bytes.fromhex(key)
    opened(monkeypatch, tmp_path, key=key).put("run.json", store.to_json(about))
    assert json.loads((tmp_path / "bucket" / "run.json").read_bytes().split(b"\n")[0])
