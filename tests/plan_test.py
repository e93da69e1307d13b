"""The plan of a run: programs, memory, bytes, and faults that would stop it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nets import config_of
from toy import settings_of, spec_of

from adloco_jax.config import default_config, validate
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.engine.memory import choose, modes, peak
from adloco_jax.engine.programs import Programs, needed_bytes
from adloco_jax.engine.spec import Machine, ProgramKey, this_machine
from adloco_jax.errors import ConfigError, ResourceError, UserError
from adloco_jax.models import Llama, hf
from adloco_jax.run.before import describe
from adloco_jax.run.before.checks import check_inputs
from adloco_jax.run.before.estimate import plan
from adloco_jax.run.kept.folder import write_config
from adloco_jax.training import train

pytestmark = pytest.mark.usefixtures("one_device")


def tiny_config():
    config = default_config()
    config.model.width, config.model.num_layers, config.model.mlp_width = 16, 1, 16
    config.data.sequence_length = 16
    config.batching.max_batch_size = 2
    config.ensemble.num_trainers = config.ensemble.num_workers = 1
    return config


def of_bytes(spec, device_bytes):
    """The same programs for devices of another size."""
    return dataclasses.replace(spec, machine=Machine(spec.machine.devices, device_bytes))


TEXT = {"source": "text", "path": __file__}


@pytest.mark.parametrize(
    ("outer", "state", "expected"),
    [
        ("nesterov", "keep", (144, 144, 288)),
        ("adamw", "keep", (144, 288, 288)),
        ("sgd", "reset", (144, 0, 0)),  # a state that is reset anyway is not sent
    ],
)
def test_bytes_of_a_merge_are_those_of_the_optimizers_own_states(outer, state, expected):
    settings = settings_of(outer={"tx": outer}, inner={"state": state})
    spec = spec_of(settings)
    assert spec.state_bytes == expected
    averaging = settings_of(outer={"tx": outer, "average": 0.5}, inner={"state": state})
    copied = spec_of(averaging).state_bytes
    assert copied == (expected[0], expected[1] + 144, expected[2])
    params, momentum, moments = expected
    assert (
        f"bytes of a merge: {params + momentum} bytes for each absorbed trainer,"
        f" {params + moments} bytes for each worker that joins a trainer"
    ) in describe.plan_lines(settings, spec)


def largest(settings, spec):
    groups = settings.ensemble, settings.batching, settings.switch
    allowed = modes(settings.model.remat, "cpu")
    return choose(spec, lambda *_: spec.loss_fn, *groups, allowed=allowed).max_batch_size


def test_the_largest_micro_batch_is_found_from_memory():
    batching = {"max_batch_size": "auto", "buckets": (2, 15), "batch_cap": 15}
    batching |= {"test": "ramp", "ramp": ((0, 2),)}
    settings = settings_of(batching=batching, merge={"policy": "none"})
    spec = spec_of(settings)
    programs = Programs(spec)
    beside = 3 * 2 * 6 * 6 * 4 + 4  # trainers' parameters and momentum, and the count of rounds
    needs = {
        size: needed_bytes(programs[ProgramKey("steps", (4,), size, accumulates=True)]) + beside
        for size in (2, 15)
    }
    assert sorted(needs.values()) == list(needs.values())
    for size, need in needs.items():
        device = -(-need * 10 // 8)  # of which a run may use exactly this much
        assert largest(settings, of_bytes(spec, device)) == size
    with pytest.raises(ResourceError, match=f"need {needs[2]} bytes") as error:
        largest(settings, of_bytes(spec, needs[2]))
    assert error.value.exit_code == 5


def test_the_batch_size_test_must_fit_the_memory_too():
    batching = {"max_batch_size": "auto", "buckets": (15,), "batch_cap": 15}
    settings = settings_of(batching=batching | {"test_batch_size": 2048})
    spec = spec_of(settings)
    programs = Programs(spec)
    sizes = (2, 1, 1)
    state = 3 * 2 * 6 * 6 * 4 + 4 * (2 * 6 * 6 * 4 + 4) + 4  # Adam's two and count; the round
    need = needed_bytes(programs[ProgramKey("stats", sizes)]) + state - 3 * 6 * 6 * 4
    steps = ProgramKey("steps", (4,), 15, accumulates=True)
    assert need > peak(programs, steps, sizes).total
    with pytest.raises(ResourceError, match="need [0-9]+ bytes"):
        largest(settings, of_bytes(spec, need))
    roomy = of_bytes(spec, int(need / 0.8) + 1)
    assert largest(settings, roomy) == 15


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with an exported model in its subfolder EXPORT."""
    folder = tmp_path_factory.mktemp("exported")
    network = Llama(257, 16, 2, 4, 2, 16, 512)
    shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes["params"])
    hf.save(params, folder / "EXPORT", load_tokenizer("bytes"), network=network)
    return folder


def test_a_plan_refuses_what_the_run_would(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(exported)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for changes, message in (
        ({"data": TEXT | {"path": "nowhere"}}, "data.path=nowhere: no such file"),
        ({"data": TEXT | {"heldout_path": __file__}}, "both hold plan_test.py"),
        (
            {"data": {"tokenizer": "no/where"}},
            "data.tokenizer=no/where: no such file or folder here",
        ),
        ({"data": {"tokenizer": "EXPORT"}, "model": {"vocab_size": 256}}, "EXPORT has 257 ids"),
        (
            {"model": {"init_from": "no/where"}},
            "folder here; on the hub: the server does",
        ),
        ({"model": {"init_from": "EXPORT"}}, "model.num_layers = 1: EXPORT has 2"),
    ):
        config = tiny_config()
        config.data.update(TEXT)
        for group, values in changes.items():
            config[group].update(values)
        with pytest.raises(UserError) as by_plan:
            plan(config)
        assert message in str(by_plan.value) and "\n" not in str(by_plan.value)
        with pytest.raises(UserError) as by_run:
            train(config, tmp_path / "run")
        assert str(by_run.value) == str(by_plan.value)


def test_a_plan_refuses_a_folder_of_another_run(tmp_path):
    settings = settings_of(num_rounds=1)
    write_config(tmp_path, settings)
    assert check_inputs(settings, tmp_path) == []
    with pytest.raises(ConfigError, match="seed: was 0, is 1"):
        check_inputs(settings_of(num_rounds=1, seed=1), tmp_path)


def test_a_plan_says_line_by_line_what_it_did_not_check(monkeypatch):
    config = tiny_config()
    config.data.update(TEXT)
    assert check_inputs(validate(config)) == []
    config.model.init_from, config.data.tokenizer = "some/model", "bytes"
    network = Llama(257, 16, 1, 4, 2, 16, 512)
    content = config_of(network, "llama")
    monkeypatch.setattr(
        hf, "inspect", lambda name: hf.PretrainedModel(network, None, (), (), content, "")
    )
    (line,) = check_inputs(validate(config))
    assert line.startswith("model.init_from = some/model: its weights")


def test_a_state_too_large_is_refused_before_any_data_are_read(tmp_path):
    config = tiny_config()
    config.data.source, config.data.path = "text", str(tmp_path / "nowhere.txt")
    config.ensemble.update(num_trainers=2, num_workers=3, initial_workers=2, spawn_frac=0.5)
    config.outer.tx, config.inner.tx, config.inner.weight_decay = "sgd", "adamw", 0.0
    num_params = 257 * 16 * 2 + 16 * 2 + 16 + 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 16
    # Two trainers; two moments and parameters for each of three workers; one gradient.
    needed = 4 * num_params * (2 + 3 * 3 + 1)
    total = this_machine().device_bytes
    for share, error, words in (
        (0.99 * needed / total, ResourceError, "2 trainers with 3 workers of"),
        (1.05 * needed / total, UserError, "nowhere.txt: no such file"),
    ):
        config.batching.memory_frac = share
        with pytest.raises(error, match=words):
            train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
