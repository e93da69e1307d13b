"""The kernel and the form of a network's program on a device."""

import contextlib
from unittest import mock

import pytest
import toy

from adloco_jax.elastic.learner import Learner, LearnerSetup
from adloco_jax.engine.model import configured_model, layer_form, program_spec
from adloco_jax.engine.spec import Machine, this_machine

pytestmark = pytest.mark.usefixtures("one_device")


def a_gpu(capability):
    # A mesh hashes its devices.
    return mock.NonCallableMock(platform="gpu", compute_capability=capability, process_index=0)


def settings_of(*, batching=(), ensemble=(), **model):
    groups = {"batching": dict(batching), "ensemble": dict(ensemble)}
    return toy.settings_of(model={"dtype": "bfloat16"} | model, **groups)


def attention_of(settings, machine):
    return configured_model(settings, machine).attention(1)


@pytest.mark.parametrize(
    ("capability", "changes", "kernel"),
    [
        ("9.0", {}, "cudnn"),
        ("7.5", {}, "xla"),
        ("9.0", {"dtype": "float32"}, "xla"),
        ("9.0", {"width": 640}, "xla"),  # heads of 160 features
        ("9.0", {"batching": {"test": "augmented"}}, "xla"),  # the test needs forward mode
    ],
)
def test_cudnn_attends_where_all_it_needs_is_there(capability, changes, kernel):
    assert attention_of(settings_of(**changes), Machine((a_gpu(capability),), 0)) == kernel


def test_a_cpu_has_no_cudnn():
    assert attention_of(settings_of(), this_machine()) == "xla"


def test_layers_are_functions_on_a_cpu_and_inlined_elsewhere():
    assert layer_form(this_machine()) == "call"
    assert layer_form(Machine((a_gpu("9.0"),), 0)) == "inline"


@pytest.mark.parametrize(
    ("num_shards", "test", "kernel"),
    [(1, "norm", "cudnn"), (2, "norm", "xla"), (2, "constant", "cudnn")],
)
def test_cudnn_leaves_statistics_of_sharded_models_to_xla(num_shards, test, kernel):
    settings = settings_of(batching={"test": test}, ensemble={"model_shards": num_shards})
    machine = Machine((a_gpu("9.0"),) * 2, 0)
    assert program_spec(settings, configured_model(settings, machine), machine).attention == kernel


def test_a_learner_attends_as_its_own_device_can_not_as_the_drivers():
    settings, gpu = settings_of(), Machine((a_gpu("9.0"),), 2**30)
    spec = program_spec(settings, configured_model(settings, gpu), gpu)
    learner = Learner(LearnerSetup(settings, spec, toy.corpus()))
    with contextlib.closing(learner.programs):
        assert (spec.attention, learner.spec.attention) == ("cudnn", "xla")
