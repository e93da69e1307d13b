"""`adloco plan CONFIG --device`: the memory of a run on devices that are not there."""

import importlib.util
import json

import pytest

from adloco_jax import main as main_module
from adloco_jax.config import default_config, validate
from adloco_jax.engine.spec import Machine
from adloco_jax.errors import ConfigError
from adloco_jax.main import main
from adloco_jax.run import device_plan as device_plan_module
from adloco_jax.run.device_plan import device_plan
from adloco_jax.run.machines import described, here, kinds

pytestmark = pytest.mark.usefixtures("one_device")


def tiny_config(**ensemble):
    config = default_config()
    config.model.width, config.model.num_layers, config.model.mlp_width = 16, 1, 16
    config.data.sequence_length = 16
    config.inner.steps_per_round = 2
    config.batching.batch_cap = 4
    config.ensemble.update({"num_trainers": 2, "num_workers": 6} | ensemble)
    return config


def of_bytes(monkeypatch, device_bytes):
    """Replaces every described device by one of this machine, with this memory."""
    machine = Machine(here().devices, device_bytes)
    monkeypatch.setattr(device_plan_module, "described", lambda name: machine)


def test_a_plan_has_every_program_with_the_state_beside_it(monkeypatch):
    of_bytes(monkeypatch, 2**30)
    lines, record = device_plan(tiny_config(), "h100")
    assert record["fits"] and record["max_batch_size"] == 4
    assert record["mode"] == "workers one after another"  # the default on a CPU
    (tried,) = record["tried"]
    kinds = {name.split()[0] for name in tried["programs"]}
    assert kinds == {"stats", "start", "steps", "outer", "loss", "merge"}
    sums = [p["program"] + p["beside"] for p in tried["programs"].values()]
    assert record["largest_bytes"] == max(sums) <= record["budget_bytes"]
    text = "\n".join(lines)
    assert text.startswith("Compiled for h100, not run.")
    assert all(f"| {name} |" in text for name in tried["programs"])
    assert f"{record['programs']} programs can be reached" in text
    # Two trainers, then the merged one. Each of these has statistics, start (with and without
    # accumulation) and the outer update. Four sizes have steps; the largest has accumulating steps.
    # The loss comes last.
    sizes = validate(tiny_config()).batching.buckets
    assert record["programs"] == 2 * 3 + len(sizes) + 1


def test_what_does_not_fit_is_said_with_a_change_that_would(monkeypatch):
    of_bytes(monkeypatch, 2**30)
    _, whole = device_plan(tiny_config(), "h100")
    fewer = {}
    for each in (1, 2):
        _, fewer[each] = device_plan(tiny_config(num_workers=2 * each), "h100")
    room = {each: record["tried"][0]["programs"] for each, record in fewer.items()}
    needed = max(p["program"] + p["beside"] for p in room[2].values())
    # less memory than two workers need at their smallest
    of_bytes(monkeypatch, int(needed / 0.8) - 400)
    config = tiny_config()
    config.batching.initial_batch_size = config.batching.max_batch_size = 4
    config.batching.max_batch_size = "auto"
    lines, record = device_plan(config, "h100")
    assert not record["fits"] and record["tried"][-1]["max_batch_size"] is None
    assert record["change"] == "ensemble.num_workers=2 would fit"
    assert any("Nothing fits" in line for line in lines)
    assert whole["fits"]


def test_device_alone_lists_the_kinds_and_others_are_refused_with_them(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["plan", "--device"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines() == kinds()
    names = [line.split()[0] for line in kinds()]
    assert names == ["a100-40", "a100-80", "h100", "h200", "b200", "v5e", "v5p", "v6e"]
    for name in ("h100x9", "h100x0", "v5ex2", "v5p", "t4", "x8", "h100x"):
        with pytest.raises(ConfigError, match="no such kind and number of chips") as error:
            described(name)
        assert all(line in str(error.value) for line in kinds())


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="it is there")
def test_the_extra_that_is_missing_is_named_in_a_line(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["plan", "quickstart", "--device", "h100x2"]) == 2
    with pytest.raises(ConfigError, match=r"install 'adloco_jax\[plan\]'"):
        described("h100x2")
    assert capsys.readouterr().out == ""


def test_a_plan_is_saved_and_ends_with_5_if_nothing_fits(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    record = {"fits": True}
    monkeypatch.setattr(device_plan_module, "device_plan", lambda *_: (["a table"], record))
    monkeypatch.setattr(main_module, "_require_devices", lambda: None)
    words = ["plan", "quickstart", "--device", "h100", "--save", str(tmp_path / "plan.json")]
    assert main(words) == 0
    assert json.loads((tmp_path / "plan.json").read_text()) == record
    record |= {"fits": False, "change": "take more"}
    assert main(words) == 5
    assert capsys.readouterr().out == "a table\n" * 2
