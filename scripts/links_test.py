"""scripts/links.py: sites with slow links, and what is computed from their runs."""

import argparse
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import links
import pytest

import adloco_jax
from adloco_jax.config import validate
from adloco_jax.data import load_corpus
from adloco_jax.engine.optimizers import inner_transform, labeller
from adloco_jax.models.configured import build_model
from adloco_jax.study import cluster

CAN_MAKE_SITES = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")


@pytest.mark.slow
def test_data_parallel_is_adamw_on_the_batch_of_all_sites():
    changes = {"model.num_layers": 1, "data.source": "text", "eval.num_sequences": 8}
    changes["data.path"] = str(links.ROOT / "docs" / "*.md")
    config = links.config_of("small", "data parallel", 0, **changes)
    found = links.parallel_updates(config, links.NUM_SITES, 2)
    settings = validate(config)
    init_fn, loss_fn = build_model(settings.model)
    tx = inner_transform(settings.inner, labeller(settings.model.arch))
    batch = settings.batching.initial_batch_size
    assert batch == 16
    how = {"num_trainers": 1, "num_workers": 1, "inner_tx": tx, "outer_tx": tx}
    workers = adloco_jax.start_round(adloco_jax.init(init_fn(jax.random.key(0)), **how))
    rows_BL = load_corpus(settings).batch(0, 0, 0, 3 * batch)
    rates_TR = jnp.full((3, 1), settings.inner.learning_rate)
    rows_TRBL = rows_BL.reshape(3, 1, batch, -1)
    how = {"inner_tx": tx, "learning_rate_TR": rates_TR}
    _, loss_TR, _ = adloco_jax.inner_steps(workers, rows_TRBL, loss_fn, **how)
    assert found["loss"] == pytest.approx(float(loss_TR[-1, 0]), rel=1e-5)


def test_the_first_rate_and_seed_come_first_and_what_needs_no_link_runs_once():
    found = [*links.cases([50, 10], [1, 2], ["float32", "int4"])]
    assert [(case.rate, case.seed) for case in found[:6]] == [(50, 1)] * 5 + [(None, 1)]
    assert [case.precision for case in found[:6]] == [
        *["float32"] * 2,
        *["int4"] * 2,
        *["float32"] * 2,
    ]
    assert len({*map(str, found)}) == len(found) == 17
    assert {case.rate for case in found if case.method == "one worker"} == {None}
    assert {"growing_pool-50mbit-1", "growing_pool-50mbit-1-int4"} < {*map(str, found)}


def test_seconds_leave_out_compiling_and_those_of_data_parallel_are_its_updates(tmp_path):
    rows = [{"wall_s": s, "loss": 3 - s / 100} for s in (50.0, 52.0, 55.0)]
    totals = {
        "round": 1,
        "updates_total": 1,
        "tokens_total": 2,
        "syncs_total": 0,
        "trainer": "consensus",
    }
    lines = [json.dumps({"event": "eval", **row, **totals}) for row in rows]
    (tmp_path / "ledger.jsonl").write_text("\n".join([*lines, '{"event": "ev']))
    curve = links.curve_of(tmp_path)
    assert [point["seconds"] for point in curve] == [2.0, 4.0, 7.0]
    given = argparse.Namespace(model="small", loss=1.6)
    timed = {"method": "data parallel", "rate": 50, "seed": 21, "update_s": 0.5, "updates": 10}
    timed["precision"] = "float32"
    (found,) = links.costs([timed | {"bytes": [{"up": 100, "down": 90}]}], given)
    updates = found["updates"]
    assert updates == links.recorded("small", links.Case("data parallel", None, 21), 1.6)["updates"]
    assert found["seconds"] == 0.5 * updates == found["curve"][-1]["seconds"]
    assert found["bytes"] == [{"up": 10 * updates, "down": 9 * updates}]
    assert f"| 21 | {0.5 * updates:,.0f} |" in links.table([found])
    given = argparse.Namespace(model="small", loss=1.3)
    (found,) = links.costs([timed | {"seed": 23, "bytes": []}], given)
    assert not found["reached"] and "| 23 | not reached |" in links.table([found])


def test_a_prediction_has_the_links_of_the_driver_and_of_the_learners_in_both_directions():
    start = {"event": "start", "num_params": 100}
    one = {"event": "round", "round": 1, "trainer": 0, "workers": 1, "tokens": 10, "bytes": 0}
    six = one | {"round": 2, "workers": 6, "tokens": 60, "bytes": 10 * 50}
    events = [start, one | {"wire_bytes": 800}, six | {"wire_bytes": 60 + 6 * 50}]
    link = cluster.Cluster(bandwidth=10, latency_s=0, flops=6000)
    first_s, both_s = links.bucket_seconds(events, link).values()
    assert first_s == 1 + (400 + 400) / 10 + (400 + 400) / 10
    assert both_s - first_s == 2 + (60 + 6 * 50) / 10 + (60 + 2 * 50) / 10  # two workers in turn


@pytest.mark.skipif(not CAN_MAKE_SITES, reason="needs root, ip and tc")
def test_a_site_has_a_slow_link_and_a_share_of_a_processor_and_leaves_nothing(tmp_path):
    log, python, size = tmp_path / "log", sys.executable, 500_000
    listen = f"""import socket
with socket.create_server(("", 9000)) as server:
    peer, left = server.accept()[0], {size}
    while left: left -= len(peer.recv(left))
    peer.send(b".")"""
    send = f"""import socket, time
for _ in range(100):
    try: peer = socket.create_connection(("{links.NET}.254", 9000)); break
    except OSError: time.sleep(0.1)
start_s = time.time(); peer.sendall(bytes({size})); peer.recv(1)
print(time.time() - start_s)
while time.time() < start_s + 2: pass
print(time.process_time())"""
    with links.network(8, 0.25) as (hub, sites):
        names = [site.name for site in (hub, *sites)]
        hub.start(python, "-c", listen, log=tmp_path / "hub.log")
        assert sites[0].start(python, "-c", send, log=log).wait() == 0
        sites[1].start("sleep", "1000", log=log)
        assert size < sites[0].num_bytes()["up"] < 1.1 * size
    seconds, processor_s = map(float, log.read_text().split())
    assert 0.4 < seconds < 5  # 0.5 s at 8 Mbit/s, more on a loaded machine
    assert processor_s < 0.25 * 2 + 0.3
    there = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not any(name in there for name in names)
    assert not [name for name in names if links._group(name).exists()]
