"""Which mode and micro-batch `auto` chooses, by what compiles."""

import dataclasses
import functools
import types

import pytest
from toy import settings_of

from adloco_jax.config import default_config, validate
from adloco_jax.engine import memory
from adloco_jax.engine.memory import (
    MODES,
    Choice,
    Mode,
    NothingFits,
    choose,
    modes,
    program_peaks,
)
from adloco_jax.engine.model import configured_model, program_spec
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.spec import Machine, this_machine
from adloco_jax.loop.adloco import start

pytestmark = pytest.mark.usefixtures("one_device")

AT_ONCE, SEQUENTIAL, AT_ONCE_REMAT, SEQUENTIAL_REMAT = MODES
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def tiny(**model):
    config = default_config()
    config.model.update({"width": 32, "num_layers": 2, "mlp_width": 128} | model)
    config.data.sequence_length = 64
    config.inner.steps_per_round = 2
    config.ensemble.num_trainers = config.ensemble.num_workers = 2
    config.batching.test, config.merge.policy = "constant", "none"
    config.batching.initial_batch_size, config.batching.batch_cap = 4, 4
    config.batching.buckets, config.batching.max_batch_size = (4,), "auto"
    return validate(config)


def spec_of(settings, device_bytes=None, platform=None):
    model = configured_model(settings, this_machine())
    spec = program_spec(settings, model, this_machine())
    devices = spec.machine.devices
    if platform is not None:
        devices = (types.SimpleNamespace(platform=platform, process_index=0, id=0),)
    machine = Machine(devices, device_bytes or spec.machine.device_bytes)
    return dataclasses.replace(spec, machine=machine)


def fitting(programs, size):
    """What a mode gives in which micro-batches up to a size fit, or none."""
    if size is None:
        raise NothingFits("does not fit", {})
    return Choice(programs, size, {})


def mode_of(programs):
    return Mode(programs.spec.sequential, programs.spec.remat)


def chosen_for(settings, spec, loss_of, size=None):
    groups = settings.ensemble, settings.batching, settings.switch
    allowed = modes(settings.model.remat, spec.machine.platform)
    return choose(spec, loss_of, *groups, allowed=allowed, size=size)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # The largest micro-batch of each mode; 8 workers, 512 tokens, buckets up to 32.
        ([4], AT_ONCE),  # 4 x 8 x 512 = 16,384 tokens
        ([3, 32], SEQUENTIAL),  # the largest bucket
        ([3, 24, 4], AT_ONCE_REMAT),
        ([3, 24, 3, 24], AT_ONCE),  # both modes have 12,288 tokens: the earlier one wins
        ([None, 16, 2, 24], SEQUENTIAL_REMAT),  # the most tokens
    ],
)
def test_the_first_mode_wins_whose_step_keeps_a_device_busy(monkeypatch, found, expected):
    settings = tiny()
    batching = settings.batching.model_copy(update={"buckets": SIZES, "initial_batch_size": 1})
    ensemble = settings.ensemble.model_copy(update={"num_workers": 8})
    settings = settings.model_copy(update={"batching": batching, "ensemble": ensemble})
    spec = dataclasses.replace(spec_of(settings, platform="gpu"), sequence_length=512)
    monkeypatch.setattr(
        memory, "tokens_of_a_row", lambda spec, sizes: 512 * (1 if spec.sequential else 8)
    )
    left = list(found)
    monkeypatch.setattr(
        memory, "_largest_fitting", lambda programs, *_: fitting(programs, left.pop(0))
    )
    choice = chosen_for(settings, spec, lambda *_: spec.loss_fn)
    assert mode_of(choice.programs) == expected and left == []
    assert choice.max_batch_size == found[MODES.index(expected)]


def test_modes_are_fewer_on_a_cpu_and_where_rematerialising_is_set():
    assert modes(None, "gpu") == list(MODES)
    assert modes(False, "tpu") == [AT_ONCE, SEQUENTIAL]
    assert modes(True, "gpu") == [AT_ONCE_REMAT, SEQUENTIAL_REMAT]
    assert modes(None, "cpu") == [SEQUENTIAL, SEQUENTIAL_REMAT]


def test_a_cpu_rematerialises_only_if_it_must():
    settings, peaks = tiny(), {}
    pool = start(settings.ensemble, settings.batching, 4)
    loss_of = functools.cache(configured_model(settings, this_machine()).loss_of)
    for mode in (SEQUENTIAL, SEQUENTIAL_REMAT):
        loss_fn = loss_of(mode, "xla")
        spec = dataclasses.replace(spec_of(settings), loss_fn=loss_fn, remat=mode.remat)
        found = program_peaks(pool, Programs(spec), settings.batching, settings.switch)
        peaks[mode] = max(p.total for p in found.values())
    assert peaks[SEQUENTIAL_REMAT] < peaks[SEQUENTIAL]
    for budget, expected in (
        (peaks[SEQUENTIAL], SEQUENTIAL),
        (peaks[SEQUENTIAL] - 1, SEQUENTIAL_REMAT),
        (peaks[SEQUENTIAL_REMAT] - 1, None),
    ):
        spec = spec_of(settings, int(budget / 0.8) + 1)

        def chosen(size=None, spec=spec):
            return chosen_for(settings, spec, loss_of, size=size).programs.spec

        if expected is None:
            with pytest.raises(NothingFits, match=f"need {peaks[SEQUENTIAL_REMAT]} bytes") as error:
                chosen()
            assert max(p.total for p in error.value.peaks.values()) == peaks[SEQUENTIAL_REMAT]
        else:
            assert chosen().remat == expected.remat
        assert not chosen(size=4).remat  # nothing is compiled


def test_a_set_micro_batch_is_every_modes(monkeypatch):
    settings = settings_of()
    spec = spec_of(tiny(), platform="gpu")
    seen = []

    def attempt(programs, sizes, *_):
        seen.append(list(sizes))
        return fitting(programs, sizes[0] if mode_of(programs).remat else None)

    monkeypatch.setattr(memory, "tokens_of_a_row", lambda spec, sizes: 1)
    monkeypatch.setattr(memory, "_largest_fitting", attempt)
    choice = chosen_for(settings, spec, lambda *_: spec.loss_fn, size=3)
    assert seen == [[3]] * 3 and choice.programs.spec.remat and choice.max_batch_size == 3


def test_a_cpu_begins_with_the_programs_of_the_first_round_and_a_pass_of_rows(monkeypatch):
    settings = tiny()
    batching = {"buckets": (1, 4, 16, 64, 1024), "batch_cap": 1024, "initial_batch_size": 1}
    changed = settings.batching.model_copy(update=batching | {"test": "norm"})
    settings = settings.model_copy(update={"batching": changed})
    spec, compiled = dataclasses.replace(spec_of(settings), examples_per_pass=20), []
    monkeypatch.setattr(Programs, "__getitem__", lambda self, key: compiled.append(key) or key)
    monkeypatch.setattr(Programs, "prefetch", lambda self, keys: None)
    monkeypatch.setattr(memory, "needed_bytes", lambda key: 2**20)
    choice = chosen_for(settings, spec, lambda *_: spec.loss_fn)
    assert choice.max_batch_size == 16
    assert [str(key) for key in dict.fromkeys(compiled)] == [
        "stats M=2 R=2 B=0",
        "start M=2 R=2 B=0",
        "steps M=1 R=2 B=1",
        "outer M=2 R=2 B=0",
    ]
