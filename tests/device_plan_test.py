"""`adloco plan CONFIG --device`: the memory of a run on devices that are not there."""

import importlib.util
import json
import os
import re
import sys
import types

import jax
import pytest

from adloco_jax import main as main_module
from adloco_jax.config import default_config
from adloco_jax.engine.spec import TAKEN, Machine, this_machine
from adloco_jax.errors import ConfigError
from adloco_jax.main import main
from adloco_jax.run.before import estimate as plan_module
from adloco_jax.run.before.estimate import device_plan, kinds, machine_named

pytestmark = pytest.mark.usefixtures("one_device")


def tiny_config(**ensemble):
    config = default_config()
    config.model.width, config.model.num_layers, config.model.mlp_width = 16, 1, 16
    config.data.sequence_length = 16
    config.inner.steps_per_round = 2
    config.batching.batch_cap, config.batching.buckets = 4, (1, 4)
    config.ensemble.update({"num_trainers": 2, "num_workers": 6} | ensemble)
    return config


def of_bytes(monkeypatch, device_bytes):
    """Replaces every described device by one of this machine, with this memory."""
    machine = Machine(this_machine().devices, device_bytes)
    monkeypatch.setattr(plan_module, "machine_named", lambda name: machine)


def test_a_plan_has_every_program_with_the_state_beside_it(monkeypatch):
    of_bytes(monkeypatch, 2**30)
    lines, record = device_plan(tiny_config(), "h100")
    assert record["fits"] and record["max_batch_size"] == 4
    assert record["mode"] == "workers one after another"  # the default on a CPU
    assert "- Fits: workers one after another; micro-batch 4; 1 device per model." in lines
    kinds = {name.split()[0] for name in record["programs"]}
    # of the first round: on a CPU others are compiled when they are needed
    assert kinds == {"stats", "start", "steps", "outer"}
    sums = [p["program"] + p["beside"] for p in record["programs"].values()]
    assert record["largest_bytes"] == max(sums) <= record["budget_bytes"]
    text = "\n".join(lines)
    assert text.startswith("Compiled for h100, not run.")
    assert all(f"| {name} |" in text for name in record["programs"])


def test_what_does_not_fit_is_said_with_the_bytes_that_it_needs(monkeypatch):
    config = tiny_config(num_workers=4)
    config.batching.update(initial_batch_size=4, batch_cap=8, buckets=(4,), max_batch_size="auto")
    of_bytes(monkeypatch, 2**10)
    lines, record = device_plan(config, "h100")
    assert not record["fits"]
    assert "4 workers of 2 trainers need" in record["fault"]
    assert "data.sequence_length" in record["fault"]
    assert f"- Nothing fits: {record['fault']}." in lines


def test_the_compiler_plans_for_what_jax_takes_of_a_described_and_a_real_gpu(monkeypatch):
    texts = []

    def topology(*, platform, target_config, topology):
        texts.append(target_config)
        return types.SimpleNamespace(devices=["gpu"])

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", topology)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    machine = machine_named("h100")
    stated = int(re.search(r"device_memory_size: (\d+)", texts[0])[1])
    taken = 0.95 * machine.device_bytes  # by the commands
    assert 0.8 * stated == pytest.approx(taken, rel=1e-9)  # of it XLA plans with four fifths

    class Gpu:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": int(taken)}  # a real one's, for which XLA plans

    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
    real = this_machine()
    assert real.device_bytes == pytest.approx(machine.device_bytes, abs=1)
    assert real.budget(None) < taken


def test_the_commands_let_jax_take_what_is_planned_with(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["adloco", "--version"])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(main_module, "main", lambda: 0)
    monkeypatch.setitem(os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    for given, expected in (("0.5", "0.5"), (None, str(TAKEN))):
        if given is None:
            monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
        with pytest.raises(SystemExit):
            main_module.command()
        assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == expected


def test_device_alone_lists_the_kinds_and_others_are_refused_with_them(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["plan", "--device"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines() == kinds()
    names = [line.split()[0] for line in kinds()]
    consumer = [f"rtx{number}" for number in (4060, 3060, "4060ti", 4080, 3090, 4090)]
    assert names == ["a100-40", "a100-80", "h100", "h200", "b200", *consumer, "v5e", "v5p", "v6e"]
    words = ["plan", "quickstart", "--device=t4", "--config.data.path=nowhere"]
    assert main(words) == 2 and "--device t4" in capsys.readouterr().err
    for name in ("h100x9", "h100x0", "v5ex2", "v5p", "t4", "x8", "h100x"):
        with pytest.raises(ConfigError, match="no such kind and number of chips") as error:
            machine_named(name)
        assert all(line in str(error.value) for line in kinds())


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="it is there")
def test_the_extra_that_is_missing_is_named_in_a_line(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["plan", "quickstart", "--device", "h100x2"]) == 2
    with pytest.raises(ConfigError, match=r"install 'adloco_jax\[plan\]'"):
        machine_named("h100x2")
    assert capsys.readouterr().out == ""


def test_a_plan_is_saved_and_ends_with_5_if_nothing_fits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    record = {"fits": True}
    monkeypatch.setattr(plan_module, "device_plan", lambda *_: (["a table"], record))
    monkeypatch.setattr("adloco_jax.cli.train.require_devices", lambda: None)
    words = ["plan", "quickstart", "--device", "h100", "--save", str(tmp_path / "plan.json")]
    assert main(words) == 0
    assert json.loads((tmp_path / "plan.json").read_text()) == record
    record |= {"fits": False, "fault": "take more"}
    assert main(words) == 5
    assert capsys.readouterr().out == "a table\n" * 2
