"""FLOP/s of a run and of the machine, and the choice of attention."""

import math
import types

import jax
import jax.numpy as jnp
import pytest
import toy

from adloco_jax.errors import ConfigError
from adloco_jax.models.llama import Llama
from adloco_jax.run.build import attention
from adloco_jax.run.ledger import read
from adloco_jax.run.throughput import flops_per_token, matmul_flops_per_s
from adloco_jax.training import fit

pytestmark = pytest.mark.usefixtures("one_device")


def test_a_token_costs_six_operations_per_weight_of_a_matrix():
    sizes = {"width": 16, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 20, "max_length": 8}
    model = Llama(vocab_size=13, num_layers=3, **sizes)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    attention_weights = 16 * 16 + 2 * 16 * 8 + 16 * 16
    gains = 3 * 2 * 16  # stacked, so of two axes: counted, and too few to matter
    assert flops_per_token(params) == 6 * (3 * (attention_weights + 3 * 16 * 20) + 16 * 13 + gains)


def test_the_machines_rate_is_measured_once():
    rate = matmul_flops_per_s("float32")
    assert math.isfinite(rate) and rate > 1e8
    assert matmul_flops_per_s("float32") == rate


def test_header_and_ledger_give_the_speed(tmp_path, capsys):
    settings = toy.settings_of(num_rounds=2, batching={"test": "constant"})
    functions = {"init_fn": toy.init_fn, "loss_fn": toy.bigram_loss}
    fit(settings, workdir=tmp_path, corpus=toy.corpus(), **functions)
    printed = capsys.readouterr().out
    assert "attention by xla" in printed and "speed: a matrix product reaches" in printed
    assert "of_matmul" in printed
    events = read(tmp_path / "ledger.jsonl")
    start, end = events[0], events[-1]
    rounds = [event for event in events if event["event"] == "round"]
    by_round = {event["round"]: event["step_s"] - event["stall_s"] for event in rounds}
    rate = end["tokens_total"] / sum(by_round.values())
    assert end["tokens_per_s"] == pytest.approx(rate, rel=0.01)
    share = end["tokens_per_s"] * start["flops_per_token"] / start["matmul_flops_per_s"]
    assert end["share_of_matmul"] == pytest.approx(share, abs=1e-3)


def a_gpu(capability):
    client = types.SimpleNamespace(platform_version="PJRT C API cuda 13000")
    return types.SimpleNamespace(client=client, compute_capability=capability, device_kind="GPU")


def settings_of(*, batching=(), **model):
    return toy.settings_of(model={"dtype": "bfloat16"} | model, batching=dict(batching))


@pytest.mark.parametrize(
    ("capability", "changes", "lacks"),
    [
        ("9.0", {}, None),
        ("7.5", {}, "older than compute capability 8.0"),
        ("9.0", {"dtype": "float32"}, "needs model.dtype = bfloat16"),
        ("9.0", {"width": 640}, "heads have 160 features"),
        ("9.0", {"batching": {"test": "augmented"}}, "needs forward mode"),
    ],
)
def test_cudnn_attends_where_all_it_needs_is_there(monkeypatch, capability, changes, lacks):
    monkeypatch.setattr(jax, "local_devices", lambda: [a_gpu(capability)])
    assert attention(settings_of(**changes)) == ("xla" if lacks else "cudnn")
    assert attention(settings_of(**changes, attention="xla")) == "xla"
    if lacks:
        with pytest.raises(ConfigError, match=f"model.attention = cudnn: .*{lacks}"):
            attention(settings_of(**changes, attention="cudnn"))


def test_cudnn_on_a_cpu_is_refused():
    assert attention(settings_of()) == "xla"
    with pytest.raises(ConfigError, match="model.attention = cudnn: needs an NVIDIA GPU"):
        attention(settings_of(attention="cudnn"))
