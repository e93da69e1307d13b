"""Learners that reach the driver directly: tickets, rights, hostile peers, and whole runs."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

import iroh
import numpy as np
import pytest
from learners import KEY, threads_that_join
from toy import settings_of
from toy_runs import events, run

from adloco_jax.elastic import child, direct, direct_driver, objects, served, store
from adloco_jax.elastic.direct import Question, Remote, Ticket, read_ticket
from adloco_jax.elastic.messages import DriverHeartbeat, LearnerRequests, Refused, RequestId
from adloco_jax.elastic.signatures import Unneeded
from adloco_jax.errors import ConfigError, ResourceError
from adloco_jax.run import join as run_join
from adloco_jax.settings import EngineSettings
from probes import faulty_store

ROOT = Path(__file__).parents[1]
SECRET = b"s" * 16
PLACES = [RequestId(generation=1, learner=number, incarnation=0) for number in (0, 1)]
MOST_BYTES = 2**22
# Who had to wait for a silent member would wait until its transfers are given up.
LESS_THAN_SILENCE_S = direct.SILENT_S / 2


class Driver:
    """A server with two free places, as a driver has it before a learner has joined."""

    def __init__(self, key=b"k" * 32, port=0, members=()):
        self.objects = objects.Memory("driver")
        free = [LearnerRequests(id=place, is_free=True) for place in PLACES]
        self.objects.put("driver/1.json", store.to_json(DriverHeartbeat(count=1, learners=free)))
        self.objects.put("run.json", b"about the run")
        self.server = served.Server(self.objects, SECRET, members, most_bytes=MOST_BYTES)
        self.endpoint = direct.wait_for(direct.bind(key, relay="off", port=port))
        direct.begin(self.server.accept(self.endpoint))
        self.port = int(self.endpoint.bound_sockets()[0].rpartition(":")[2])
        self.ticket = Ticket(self.endpoint.id().to_bytes(), SECRET, (f"127.0.0.1:{self.port}",))

    def close(self):
        direct.wait_for(self.endpoint.close())
        del self.endpoint  # which holds the port


@pytest.fixture
def driver():
    made = Driver()
    yield made
    made.close()


@pytest.fixture
def joining(driver):
    """A function that makes a learner's keeper of objects, by its key."""
    with contextlib.ExitStack() as stack:

        def make(key, ticket=driver.ticket):
            remote = Remote(str(ticket), key * 32)
            stack.callback(remote.close)
            return remote

        yield make


def id_of(key):
    return str(iroh.SecretKey.from_bytes(key * 32).public())


def heartbeat(place):
    return place.heartbeat_name()


def test_a_ticket_is_short_and_says_where_the_driver_is():
    addresses = ("192.168.1.5:4433", "[2001:db8::7]:4433")
    ticket = Ticket(b"p" * 32, SECRET, addresses, "https://relay.example./")
    assert read_ticket(str(ticket)) == ticket
    assert read_ticket(f" {str(ticket).lower()[:60]}\n{str(ticket)[60:]}") == ticket
    assert len(str(Ticket(b"p" * 32, SECRET, addresses[:1]))) < 110


@pytest.mark.parametrize("text", ["adloco-", "adloco-K7F2", "adloco-!!", "cut", "changed"])
def test_a_ticket_that_is_not_whole_is_refused_in_one_line(text):
    whole = str(Ticket(b"p" * 32, SECRET, ("192.168.1.5:4433",)))
    if text == "cut":
        text = whole[:-1]
    elif text == "changed":
        text = whole.replace(whole[30], "A" if whole[30] != "A" else "B")
    with pytest.raises(ConfigError, match="no ticket") as error:
        read_ticket(text)
    assert "\n" not in str(error.value)


def test_what_is_sent_is_not_copied_byte_by_byte(driver, joining):
    """The wheel's own way takes 1.5 s for 5 MB, with the interpreter's lock held."""
    assert direct.send_at_once()
    remote, place = joining(b"a"), PLACES[0]
    driver.objects.put(place.of(1).name("requests"), b"asked")
    assert remote.create(heartbeat(place), b"here")
    data = np.random.default_rng(0).bytes(MOST_BYTES)
    start_s = time.process_time()  # other processes do not count
    remote.put(place.of(1).name("responses"), data)
    assert time.process_time() - start_s < 0.5
    assert b"".join(driver.objects.get(place.of(1).name("responses"))[1]) == data


def test_a_driver_without_the_known_class_sends_slowly(monkeypatch):
    monkeypatch.delattr(iroh.iroh_ffi, "_UniffiRustBufferBuilder")
    assert not direct.send_at_once.__wrapped__()


def test_a_learner_does_in_its_own_place_what_a_bucket_would_let_it_do(driver, joining):
    there, place = store.Store(joining(b"a"), Unneeded()), PLACES[0]
    assert there.get("run.json") == b"about the run" and there.get("params/1/0.safetensors") is None
    driver.objects.put("params/1/0.safetensors", b"parameters")
    driver.objects.put(place.of(1).name("requests"), b"asked")
    assert there.get("params/1/0.safetensors") == b"parameters"
    begun = DriverHeartbeat(count=1)
    assert there.create(heartbeat(place), begun) and not there.create(heartbeat(place), begun)
    assert driver.server.owner(place) == id_of(b"a")[:8]
    there.put(heartbeat(place), b"still here")
    assert there.get(place.of(1).name("requests")) == b"asked"
    there.put(place.of(1).name("responses"), b"done")
    there.delete(heartbeat(place))
    assert sorted({*driver.objects.names()} - {"driver/1.json", "run.json"}) == [
        "params/1/0.safetensors",
        place.of(1).name("requests"),
        place.of(1).name("responses"),
    ]


@pytest.mark.parametrize(
    ("do", "name"),
    [
        ("put", "run.json"),
        ("create", "driver/2.json"),
        ("put", "params/1/0.safetensors"),
        ("put", "learners/1/0-0.json"),
        ("delete", "learners/1/0-0.json"),
        ("get", "requests/1/0-0/1.safetensors"),
        ("put", "responses/1/0-0/1.safetensors"),
        ("put", "requests/1/1-0/1.safetensors"),
        ("create", "learners/1/7-0.json"),
        ("create", "learners/1/1-0/7.safetensors"),  # a place, but no heartbeat
        ("create", "learners/1/01-0.json"),
        ("get", "../endpoint.key"),
        ("put", "/etc/passwd"),
    ],
)
def test_all_else_is_refused_and_said(driver, joining, capsys, do, name):
    """Learner b has place 1; place 0 is a's."""
    one, other = joining(b"a"), joining(b"b")
    assert one.create(heartbeat(PLACES[0]), b"a") and other.create(heartbeat(PLACES[1]), b"b")
    driver.objects.put(PLACES[0].of(1).name("requests"), b"asked")
    before = {each: driver.objects._objects[each] for each in driver.objects.names()}
    if do == "put":
        other.put(name, b"mine")
    elif do == "create":
        assert not other.create(name, b"mine")
    elif do == "delete":
        other.delete(name)
    else:
        assert other.get(name) is None
    assert driver.objects._objects == before
    is_said = f"learner {id_of(b'b')[:8]} was refused to {do} {name}" in capsys.readouterr().out
    assert is_said or name == "learners/1/7-0.json"  # a place that is taken is no fault


def test_a_response_that_nobody_waits_for_is_not_kept(driver, joining):
    remote, place = joining(b"a"), PLACES[0]
    assert remote.create(heartbeat(place), b"here")
    remote.put(place.of(9).name("responses"), bytes(1000))
    assert place.of(9).name("responses") not in driver.objects.names()


def test_without_the_secret_nobody_passes_the_first_message(driver, joining, capsys):
    strange = Ticket(driver.ticket.key, b"x" * 16, driver.ticket.addresses)
    with pytest.raises(ConfigError, match="the ticket is not this run's") as error:
        joining(b"a", strange).open()
    assert "\n" not in str(error.value)
    assert "turned away without the run's secret" in capsys.readouterr().out

    async def ask(question):
        endpoint = await direct.bind(b"z" * 32, relay="off")
        key = iroh.EndpointId.from_bytes(driver.ticket.key)
        address = iroh.EndpointAddr(key, None, [*driver.ticket.addresses])
        connection = await endpoint.connect(address, direct.PROTOCOL)
        with direct.connection_errors():
            answer, _ = await direct._ask_on(connection, question)
        await endpoint.close()
        return answer

    answer = direct.wait_for(ask(Question(do="get", name="run.json")))
    assert answer.status == "refused" and answer.size == 0


def test_members_are_let_in_and_others_are_not(joining, capsys):
    made = Driver(key=b"m" * 32, members={id_of(b"a")})
    try:
        joining(b"a", made.ticket).open()
        with pytest.raises(ConfigError, match=f"engine.members does not name {id_of(b'b')}"):
            joining(b"b", made.ticket).open()
    finally:
        made.close()
    assert "has the ticket and was turned away" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["another run", "nobody there"])
def test_a_driver_that_cannot_be_reached_is_one_line_that_says_what_helps(
    monkeypatch, joining, driver, fault
):
    monkeypatch.setattr(direct, "CONNECT_S", 0.5)
    key = iroh.SecretKey.from_bytes(b"o" * 32).public().to_bytes()
    ticket = Ticket(key, SECRET, driver.ticket.addresses)
    if fault == "nobody there":
        ticket = Ticket(driver.ticket.key, SECRET, ("127.0.0.1:9",))
    with pytest.raises(ResourceError, match="cannot reach the driver") as error:
        joining(b"a", ticket).open()
    words = ("UDP to 127.0.0.1", "no relay", "engine.address", "engine.relay", "VPN", "bucket")
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert error.value.exit_code == 5


def hostile(driver, send):
    """Let a member that is let in do `send(connection)`, and close it."""

    async def act():
        endpoint = await direct.bind(b"h" * 32, relay="off")
        key = iroh.EndpointId.from_bytes(driver.ticket.key)
        address = iroh.EndpointAddr(key, None, [*driver.ticket.addresses])
        connection = await endpoint.connect(address, direct.PROTOCOL)
        hello = Question(do="hello", secret=SECRET.hex())
        await direct._ask_on(connection, hello)
        try:
            return await asyncio.wait_for(send(connection), 5.0)
        finally:
            await endpoint.close()

    return direct.wait_for(act())


async def announces_two_gigabytes(connection):
    create = Question(do="create", name=heartbeat(PLACES[0]), size=4)
    await direct._ask_on(connection, create, b"here")
    name = PLACES[0].of(1).name("responses")
    answer, _ = await direct._ask_on(connection, Question(do="put", name=name, size=2**31))
    return answer.why


async def sends_garbage(connection):
    stream = await connection.open_bi()
    await stream.send().write_all(np.random.default_rng(0).bytes(5000))
    with pytest.raises(iroh.IrohError):
        await stream.recv().read_exact(1)
    return "garbage"


async def opens_a_thousand_streams(connection):
    kept = []
    with contextlib.suppress(TimeoutError, iroh.IrohError):
        for _ in range(1000):
            stream = await asyncio.wait_for(connection.open_bi(), 1.0)
            await stream.send().write_all(b"\0")
            kept.append(stream)
    return str(len(kept))


@pytest.mark.parametrize(
    ("send", "words"),
    [
        (announces_two_gigabytes, "2147483648 bytes, expected at most"),
        (sends_garbage, "garbage"),
        (opens_a_thousand_streams, None),
    ],
)
def test_a_hostile_member_does_not_keep_others_from_working(driver, joining, send, words):
    driver.objects.put(PLACES[0].of(1).name("requests"), b"asked")
    found = hostile(driver, send)
    assert words in found if words else int(found) < 200
    remote = joining(b"a")
    start_s = time.monotonic()
    assert b"".join(remote.get("run.json")[1]) == b"about the run"
    assert time.monotonic() - start_s < LESS_THAN_SILENCE_S


@pytest.mark.parametrize("do", ["put", "get"])
def test_a_member_that_opens_many_transfers_fills_neither_memory_nor_the_way(driver, joining, do):
    """Each stream asks for most of what a learner may have; only one has room at a time."""
    room, num_bytes, most_held = driver.server._room, MOST_BYTES - 2**18, []
    for number, place in enumerate(PLACES):
        driver.objects.put(place.of(1).name("requests"), bytes([number]) * num_bytes)

    async def opens_many(connection):
        await direct._ask_on(
            connection, Question(do="create", name=heartbeat(PLACES[0]), size=1), b"h"
        )
        name = PLACES[0].of(1).name("responses" if do == "put" else "requests")
        size = num_bytes if do == "put" else 0
        header = Question(do=do, name=name, size=size).model_dump_json().encode()
        kept = []
        for _ in range(6):
            stream = await connection.open_bi()
            await stream.send().write_all(
                len(header).to_bytes(4, "big") + header + bytes(size // 9)
            )
            kept.append(stream)
        await asyncio.sleep(1.0)  # nothing is sent or read any more
        most_held.append(dict(room._held))
        start_s = time.monotonic()
        other = joining(b"a")
        await asyncio.to_thread(use_place, other)
        return time.monotonic() - start_s

    def use_place(other):
        assert other.create(heartbeat(PLACES[1]), b"here")
        asked, answered = (PLACES[1].of(1).name(part) for part in ("requests", "responses"))
        other.put(answered, b"".join(other.get(asked)[1]))
        assert b"".join(driver.objects.get(answered)[1]) == bytes([1]) * num_bytes

    assert hostile(driver, opens_many) < LESS_THAN_SILENCE_S
    assert most_held == [{id_of(b"h"): num_bytes}]
    until_s = time.monotonic() + 10.0
    while room._held and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not room._held and room._copied == 0


def test_a_driver_that_is_killed_and_started_again_has_the_ticket_of_before(monkeypatch, tmp_path):
    engine, key = EngineSettings(kind="direct", relay="off"), b"k" * 32
    endpoint, ticket = direct.wait_for(direct_driver._open(key, engine, tmp_path / "ticket"))
    direct.wait_for(endpoint.close())
    del endpoint  # which holds the port
    endpoint, again = direct.wait_for(direct_driver._open(key, engine, tmp_path / "ticket"))
    monkeypatch.setattr(direct_driver, "_FREE_S", 0.0)
    with pytest.raises(ResourceError, match="cannot use UDP port"):
        direct.wait_for(direct_driver._open(b"l" * 32, engine, tmp_path / "ticket"))
    direct.wait_for(endpoint.close())
    assert again == ticket and (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600


def test_each_socket_keeps_the_port_that_the_ticket_names_for_it(tmp_path):
    """IPv4 and IPv6 have a socket each, and either may come first in a ticket."""
    both = "[2001:db8::7]:45741", "192.168.1.5:45743"
    ticket = Ticket(b"p" * 32, SECRET, both)
    assert direct_driver._here(ticket).addresses == ("[::1]:45741", "127.0.0.1:45743")
    only = Ticket(b"p" * 32, SECRET, both[:1], "https://relay.example./")
    assert direct_driver._here(only) == Ticket(b"p" * 32, SECRET, ("[::1]:45741",))
    direct_driver._check_address(both[0])

    (tmp_path / "ticket").write_text(str(ticket))
    engine = EngineSettings(kind="direct", relay="off")
    endpoint, _ = direct.wait_for(direct_driver._open(b"k" * 32, engine, tmp_path / "ticket"))
    sockets = endpoint.bound_sockets()
    direct.wait_for(endpoint.close())
    assert sockets == ["0.0.0.0:45743", "[::]:45741"]


def test_ticket_and_description_are_whole_when_a_write_fails(monkeypatch, tmp_path):
    """A driver that is killed, or has no room, leaves what learners and the next driver know."""
    made = direct_driver.RunObjects(tmp_path)
    made.put("run.json", b"about the run")
    engine = EngineSettings(kind="direct", relay="off")
    endpoint, ticket = direct.wait_for(direct_driver._open(b"k" * 32, engine, tmp_path / "ticket"))
    direct.wait_for(endpoint.close())
    del endpoint
    (tmp_path / ".ticket.partial").write_text("cut")  # of a driver that was killed
    (tmp_path / ".ticket.partial").chmod(0o644)

    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        made.put("run.json", b"about the run, again")
    with pytest.raises(OSError, match="No space"):
        direct.wait_for(direct_driver._open(b"k" * 32, engine, tmp_path / "ticket"))
    assert (tmp_path / "run.json").read_bytes() == b"about the run"
    assert (tmp_path / "ticket").read_text() == str(ticket)
    assert (tmp_path / ".ticket.partial").stat().st_mode & 0o777 == 0o600


def test_what_a_peer_says_does_not_steer_the_terminal(driver, capsys):
    """A name with escapes, an end of line or marks of direction could write lines of its own."""

    async def asks(connection):
        name = "x\x1b[2J\x9b1A\rround 9\nlearner \u202elost"
        await direct._ask_on(connection, Question(do="get", name=name))

    hostile(driver, asks)
    shown = capsys.readouterr().out
    assert "refused to get x?[2J?1A?round 9?learner ?lost: not its place" in shown


def test_a_learner_reaches_a_driver_that_was_started_again(monkeypatch, joining):
    monkeypatch.setattr(direct, "LOOK_S", 0.2)
    monkeypatch.setattr(direct, "LATE_S", 1.0)
    first = Driver(key=b"r" * 32)
    there = store.Store(joining(b"a", first.ticket), Unneeded())
    assert there.get("run.json") == b"about the run"
    first.close()
    second = Driver(key=b"r" * 32, port=first.port)
    try:
        assert there.get("run.json") == b"about the run"
    finally:
        second.close()


def test_learners_that_run_at_once_have_a_key_each_and_keep_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (one, lock), (two, other) = direct.own_key(), direct.own_key()
    lock.release()
    again, lock = direct.own_key()
    assert one == again != two and len(one) == 32
    paths = [*(tmp_path / "adloco_jax").glob("*.key")]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600} and len(paths) == 2
    for each in (lock, other):
        each.release()


def settings_for(kind, address=""):
    return settings_of(
        num_rounds=3,
        ensemble={"num_trainers": 1, "num_workers": 2},
        merge={"policy": "none"},
        outer={"precision": "int4"},
        engine={"kind": kind, "address": address, "heartbeat_s": 4.0, "steps": "equal"}
        | ({"relay": "off"} if kind == "direct" else {}),
    )


@pytest.mark.usefixtures("one_device")
def test_a_run_over_direct_is_bit_for_bit_that_over_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ADLOCO_KEY", KEY)
    address = f"file://{tmp_path}/bucket"
    ended = {}
    for kind, where in (("bucket", address), ("direct", "")):
        folder = tmp_path / kind
        with threads_that_join(2, lambda f=folder, w=where: w or (f / "learners/ticket")):
            ended[kind] = run(folder, settings_for(kind, where))
    losses = [[e["train_loss"] for e in events(tmp_path / kind, "round")] for kind in ended]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    one, two = ((tmp_path / kind / "export/params.safetensors").read_bytes() for kind in ended)
    assert one == two
    names = {e["owner"] for e in events(tmp_path / "direct", "learner")}
    assert len(names) == 2 and all(len(name) == 8 for name in names)
    assert threading.active_count() < 40


def test_the_learner_of_a_driver_ends_with_it_however_that_ends():
    code = "import time; from adloco_jax.elastic.child import end_with_parent; end_with_parent();"
    code += "print('begun', flush=True); time.sleep(60)"
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], **how)
    assert process.stdout.readline() == "begun\n"
    process.stdin.close()  # as the system does when the driver is killed
    assert process.wait(10) == 0
    process.stdout.close()


def test_the_learner_of_a_driver_starts_beside_a_clone(monkeypatch, tmp_path):
    other = tmp_path / "adloco_jax"  # python -m alone would take it for the package
    other.mkdir()
    (other / "__init__.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    command = [*child._COMMAND[:-1], "adloco_jax.host.versions"]
    monkeypatch.setattr(child, "_COMMAND", command)
    with child._start("") as process:
        assert process.wait() == 0, process.stdout.read()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["direct", "bucket"])
def test_a_driver_trains_on_its_own_computer_too(kind, tmp_path):
    """In a bucket a learner elsewhere, which has not the text, takes part too."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "elsewhere").mkdir()
    text = tmp_path / "driver" / "text.txt"
    text.write_text((ROOT / "adloco_jax" / "settings.py").read_text())
    keys = {
        "num_rounds": 2,
        "inner.steps_per_round": 3,
        "data.num_sequences": 200,
        "data.path": text.name,
        "ensemble.num_workers": 2,
        "engine.kind": kind,
    }
    environ = os.environ | {"XDG_CONFIG_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        if kind == "direct":
            keys |= {"engine.relay": "off", "engine.max_learners": 1}
        else:
            url = stack.enter_context(faulty_store.s3_server("bkt"))
            environ |= faulty_store.environment(url) | {"ADLOCO_KEY": KEY}
            keys |= {"engine.address": "s3://bkt/run", "engine.max_learners": 2}
            keys |= {"engine.trains_here": True, "engine.serves_files": True}

        def start(place, *words):
            command = [sys.executable, "-m", "adloco_jax", *words]
            how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            own = environ | {"XDG_CACHE_HOME": str(tmp_path / place / "cache")}
            process = subprocess.Popen(command, cwd=tmp_path / place, env=own, **how)
            stack.callback(process.kill)
            return process

        words = [f"--config.{key}={value}" for key, value in keys.items()]
        driver = start("driver", "train", "diloco", "--workdir", "run", *words)
        if kind == "bucket":
            other, _ = start("elsewhere", "join", "s3://bkt/run").communicate(timeout=300)
            assert re.search("the run is over: [12] responses", other), other
        printed, _ = driver.communicate(timeout=300)

    assert driver.returncode == 0, printed
    assert "  here | joined as learner" in printed
    assert re.search("  here [|] the run is over: [12] responses", printed), printed
    assert f"adloco join {'adloco-' if kind == 'direct' else 's3://bkt/run'}" in printed
    (first, *_) = events(tmp_path / "driver" / "run", "learner")
    assert first.get("owner") == ("this computer" if kind == "direct" else None)


def test_a_secret_is_hexadecimal_digits():
    with pytest.raises(ValueError, match="secret"):
        Question(do="hello", secret="\u00e9")


def test_what_a_driver_serves_is_checked_as_of_its_run(monkeypatch):
    """Served files are read before the learner exists, and are signed for the run."""
    here = types.SimpleNamespace(url="there", signatures=types.SimpleNamespace(run=""))
    seen = []

    def setup(bucket, *arguments, **more):
        seen.append(bucket.signatures.run)
        raise Refused("files/x: damaged")

    monkeypatch.setattr(run_join, "opened", lambda *_: contextlib.nullcontext(here))
    monkeypatch.setattr(run_join, "read_run", lambda _: types.SimpleNamespace(id="this run"))
    monkeypatch.setattr(run_join, "learner_setup", setup)
    with pytest.raises(ConfigError, match="files/x: damaged; start the driver again"):
        run_join.join("there", own={})
    assert seen == ["this run"]
