"""Adapters: small trained matrices beside frozen weights, from the layers to a run's export."""

import contextlib
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from learners import KEY, Here, InBucket
from nets import flat
from toy import tiny_config, with_its_weights
from toy_runs import events
from trees import assert_close, assert_equal

from adloco_jax import main as cli
from adloco_jax.config import completed, validate
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.elastic import store
from adloco_jax.elastic.messages import RunDescription, array_bytes
from adloco_jax.elastic.signatures import Signatures
from adloco_jax.engine.evaluate import loss_key
from adloco_jax.engine.model import program_spec
from adloco_jax.engine.programs import Programs, lower
from adloco_jax.engine.spec import ProgramKey, this_machine
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.models import Llama, hf
from adloco_jax.models.layers import Adapter, param_shapes, split_adapter, with_adapter
from adloco_jax.models.llama import next_token_loss, sequence_losses
from adloco_jax.run.join import join
from adloco_jax.settings import SIZES as KNOWN
from adloco_jax.training import train

SIZES = dict(vocab_size=11, width=12, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=10)
PLAIN = Llama(**SIZES, max_length=16, tied=True, qkv_bias=True)
NETWORK = PLAIN.clone(adapter=Adapter(rank=2, alpha=3.0))
ROWS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (4, 9)), jnp.int32)


@functools.cache
def initial(network):
    return jax.jit(network.init)(jax.random.key(1), ROWS[:, :-1])["params"]


@functools.cache
def drawn(network=NETWORK):
    """The adapter, whose second matrices are not zero, and the base weights."""
    rng = np.random.default_rng(2)
    return split_adapter(
        jax.tree.map(lambda x: x + np.float32(0.1 * rng.normal(size=x.shape)), initial(network))
    )


def merged(adapter, base, scale=1.5):
    """W + alpha/r A B, by hand."""
    low, leaves = flatten_dict(adapter), flatten_dict(base)
    for path in [path[:-1] for path in low if path[-1] == "lora_a"]:
        product = jnp.einsum("nda,naf->ndf", low[*path, "lora_a"], low[*path, "lora_b"])
        leaves[*path, "kernel"] = leaves[*path, "kernel"] + scale * product
    return unflatten_dict(leaves)


def split_layers(base):
    """Each layer's arrays by themselves, as programs take them."""
    return base | {"layers": jax.tree.map(tuple, base["layers"])}


def starting_model(config):
    return with_its_weights(completed(validate(config)))[0]


def test_the_loss_and_gradient_are_those_of_the_merged_weights():
    adapter, base = drawn()
    of_merged = next_token_loss(PLAIN)
    wanted, grad = jax.jit(jax.value_and_grad(lambda a: of_merged(merged(a, base), ROWS)))(adapter)
    inline = NETWORK.clone(layer_form="inline", remat=True)
    for network, given in ((NETWORK, base), (inline, split_layers(base))):
        update = jax.jit(jax.value_and_grad(next_token_loss(network)))
        found = update(adapter, ROWS, base=given)
        np.testing.assert_allclose(found[0], wanted, rtol=1e-6)
        assert_close(found[1], grad, rtol=2e-5, atol=1e-8)
    assert jax.tree.structure(adapter) == jax.tree.structure(grad)
    whole = with_adapter(base, adapter)
    np.testing.assert_allclose(jax.jit(next_token_loss(NETWORK))(whole, ROWS), wanted, rtol=1e-6)


def test_taps_measure_the_adapters_gradients_alone():
    network = PLAIN.clone(adapter=Adapter(2, 3.0, "attention"))
    adapter, base = drawn(network)
    loss_fn, losses_fn = next_token_loss(network), sequence_losses(network)

    def loss_of_taps(tap_B):
        return loss_fn(adapter, ROWS, tap_B=tap_B, base=base)

    norms_B = len(ROWS) ** 2 * jax.jit(jax.grad(loss_of_taps))(jnp.zeros(len(ROWS)))

    @jax.jit
    def gradients_and_slopes(adapter):
        losses_of = functools.partial(losses_fn, rows=ROWS, base=base)
        return jax.jacrev(losses_of)(adapter), jax.jvp(losses_of, (adapter,), (adapter,))[1]

    grads_B, slopes_B = gradients_and_slopes(adapter)
    grads_B = flat(grads_B, axes=1)
    np.testing.assert_allclose(norms_B, np.square(grads_B).sum(axis=1), rtol=1e-4)
    np.testing.assert_allclose(slopes_B, grads_B @ flat(adapter), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "parts"), [("attention", {"attention"}), ("all", {"attention", "mlp"})]
)
def test_the_layers_of_an_adapter_are_those_that_the_setting_names(layers, parts):
    network = PLAIN.clone(adapter=Adapter(2, 3.0, layers))
    adapter, _ = split_adapter(param_shapes(network))
    assert {path[:2] for path in flatten_dict(adapter)} == {("layers", part) for part in parts}


def test_an_adapter_begins_as_peft_does_and_changes_nothing():
    adapter, base = split_adapter(initial(NETWORK))
    a_NDr = adapter["layers"]["mlp"]["gate"]["lora_a"]
    assert a_NDr.shape == (2, 12, 2) and 0.8 * 12**-0.5 < np.abs(a_NDr).max() <= 12**-0.5
    np.testing.assert_array_equal(adapter["layers"]["mlp"]["gate"]["lora_b"], np.zeros((2, 2, 10)))
    losses = jax.jit(sequence_losses(NETWORK))(adapter, ROWS, base=base)
    np.testing.assert_array_equal(losses, jax.jit(sequence_losses(PLAIN))(base, ROWS))


def test_an_update_computes_no_gradient_of_the_base():
    """Forward, backward to the activations, and three products for each matrix of the adapter."""
    plain = PLAIN.clone(width=64, mlp_width=176, num_layers=1, layer_form="inline")
    network = plain.clone(adapter=Adapter(rank=4, alpha=3.0))
    adapter, base = drawn(network)

    def operations(function, *arrays):
        return jax.jit(function).lower(*arrays).compile().cost_analysis()["flops"]

    def update(adapter, base):
        return jax.value_and_grad(next_token_loss(network))(adapter, ROWS, base=base)

    own = 6 * ROWS[:, 1:].size * sum(leaf.size for leaf in jax.tree.leaves(adapter))
    forward = operations(next_token_loss(plain), base, ROWS)
    assert operations(update, adapter, split_layers(base)) < 1.15 * (2 * forward + own)


def test_frozen_weights_of_bfloat16_are_used_as_they_are():
    adapter, base = drawn()
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), base)
    loss_fn = jax.jit(sequence_losses(NETWORK))
    np.testing.assert_array_equal(
        loss_fn(adapter, ROWS, base=base), loss_fn(adapter, ROWS, base=wide)
    )


# --- Runs -------------------------------------------------------------------------------------


BYTES = Llama(**SIZES | {"vocab_size": 257, "num_layers": 1}, max_length=32)
random_params = jax.jit(lambda key: BYTES.init(key, ROWS[:, :-1])["params"])


def made(folder, seed):
    """A folder with a random model that reads bytes."""
    params = random_params(jax.random.key(seed))
    params = jax.tree.map(lambda leaf: 5 * leaf, params)  # what is written is then far from even
    hf.save(params, folder, load_tokenizer("bytes"), network=BYTES)
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return made(tmp_path_factory.mktemp("base") / "llama", seed=5)


def adapted(init_from, *, num_rounds=2, test="norm", **groups):
    """A config of rounds of two trainers, which merge after the first."""
    pool = {"num_trainers": 2, "num_workers": 2}
    return tiny_config(
        ensemble=pool | groups.pop("ensemble", {}),
        model=dict.fromkeys(KNOWN) | {"init_from": str(init_from)},
        adapter={"rank": 2, "alpha": 3.0} | groups.pop("adapter", {}),
        batching={"test": test, "max_batch_size": 1, "batch_cap": 1, "initial_batch_size": 1},
        merge={"every_rounds": 1},
        checkpoint={"every_rounds": 1},
        num_rounds=num_rounds,
        **groups,
    )


@pytest.fixture(scope="module")
def trained(weights, one_device, tmp_path_factory):
    return train(adapted(weights), tmp_path_factory.mktemp("trained") / "r")


def in_one_round(init_from, **groups):
    """A config of a single round, in which nothing is measured or merged."""
    return adapted(init_from, num_rounds=1, test="constant", **groups)


@pytest.fixture(scope="module")
def after_one_round(weights, one_device, tmp_path_factory):
    """The parameters after it."""
    return train(in_one_round(weights), tmp_path_factory.mktemp("one_round") / "r").params


def test_a_run_trains_measures_merges_and_saves_the_adapter_alone(trained):
    assert len(events(trained.workdir, "merge")) == 1
    leaves = flatten_dict(trained.params)
    assert {path[-1] for path in leaves} == {"lora_a", "lora_b"} and all(
        map(np.any, leaves.values())
    )
    sizes = [leaf.size for leaf in leaves.values()]
    assert events(trained.workdir, "start")[0]["num_params"] == sum(sizes)
    assert all(line["signal"] is not None for line in events(trained.workdir, "round")[:2])


def test_devices_that_share_workers_and_weights_compute_the_same(
    one_device, after_one_round, weights, tmp_path, monkeypatch
):
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda *_, **__: one_device[:4])
    config = in_one_round(weights, ensemble={"model_shards": 2})
    assert_close(train(config, tmp_path / "spread").params, after_one_round, rtol=1e-3, atol=1e-4)


def test_a_run_resumes_bit_for_bit_with_the_same_base_alone(trained, weights, tmp_path):
    config, folder = adapted(weights), shutil.copytree(trained.workdir, tmp_path / "r")
    shutil.rmtree(folder / "checkpoints" / "2")
    made(weights, seed=6)
    with pytest.raises(DataError, match="model.init_from has other weights than when this run"):
        train(config, folder)
    made(weights, seed=5)
    assert_equal(train(config, folder).params, trained.params)
    sizes = [file.stat().st_size for file in (folder / "checkpoints").rglob("*")]
    assert max(sizes) < (weights / "model.safetensors").stat().st_size


@pytest.mark.usefixtures("one_device")
def test_programs_take_the_base_as_an_argument_that_a_device_holds_once(weights):
    settings = completed(validate(adapted(weights)))
    model, _ = with_its_weights(settings)
    base = model.base
    assert model.params is None
    spec = program_spec(settings, model, this_machine())
    keys = [ProgramKey("steps", (1, 1), 1), ProgramKey("stats", (1, 1)), loss_key(1)]
    for key in keys:
        constants = re.findall(r"dense<[^>]*>", lower(spec, key).as_text())
        assert constants and max(map(len, constants)) < 2_000
    with contextlib.closing(Programs(spec)) as programs:
        programs.set_frozen(base.params)
        given = jax.tree.leaves(base.params)
        held = [jax.tree.leaves(programs.frozen(key)) for key in keys[1:]]
        where = [[leaf.unsafe_buffer_pointer() for leaf in leaves] for leaves in held]
        assert where[0] == where[1] == [leaf.unsafe_buffer_pointer() for leaf in given]


def test_an_export_is_read_merged_continued_and_writes(trained, weights, tmp_path, capsys):
    export = trained.workdir / "export"
    loaded, (adapter, base) = hf.load(export), split_adapter(hf.load(export).params)
    assert_equal(adapter, trained.params)
    assert_equal(base, hf.load(weights).params)
    assert cli.main(["generate", str(trained.workdir), "--prompt=a", "--tokens=3"]) == 0
    assert cli.main(["export", str(trained.workdir), "--merge", f"--out={tmp_path / 'whole'}"]) == 0
    whole = hf.load(tmp_path / "whole")
    assert whole.network == hf.load(weights).network
    params, other = jax.tree.map(jnp.asarray, (loaded.params, whole.params))
    wanted = loaded.network.apply({"params": params}, ROWS)
    assert_close(whole.network.apply({"params": other}, ROWS), wanted, rtol=1e-5, atol=1e-4)
    params = starting_model(adapted(export, adapter={"rank": 0})).params
    assert_close(params, whole.params, rtol=1e-6)
    assert_equal(starting_model(adapted(export)).params, trained.params)
    config = adapted(export, adapter={"rank": 4, "alpha": 3.0})
    with pytest.raises(ConfigError, match="is one of rank 2, alpha 3 and layers all; set these"):
        starting_model(config)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"use_rslora": True}, "use_rslora: have True, need none; or merge_and_unload"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: have pissa, need True or gaussian or"),
        ({"key_of_a_later_peft": 0.5}, "key_of_a_later_peft: have 0.5, need none"),
        ({"r": 0}, "r: have 0, need a positive integer"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path: have None, need a model, no"),
        ({"base_model_name_or_path": "ADAPTER"}, "have .*adapter, need a model, no adapter"),
        ({"target_modules": ["q_proj"]}, r"target_modules: have \['q_proj'\], need down_proj, "),
        ({"r": 3}, r"lora_A.weight: have \(2, 12\), want \(3, 12\)"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(trained, tmp_path, changes, fault):
    folder = shutil.copytree(trained.workdir / "export", tmp_path / "adapter")
    path = folder / "adapter_config.json"
    text = json.dumps(json.loads(path.read_text()) | changes)
    path.write_text(text.replace("ADAPTER", str(folder)))
    with pytest.raises(DataError, match=fault):
        hf.load(folder)


def test_other_base_weights_of_equal_shape_are_refused_wherever_an_adapter_meets_them(
    trained, weights, tmp_path, capsys
):
    run = shutil.copytree(trained.workdir, tmp_path / "r")
    assert cli.main(["export", str(run), "--merge", f"--out={tmp_path / 'whole'}"]) == 0
    made(weights, seed=6)
    capsys.readouterr()
    asked = ["generate", str(run), "--prompt=a", "--tokens=3"]
    for words in (["export", str(run), "--merge", f"--out={tmp_path / 'other'}"], asked):
        assert cli.main(words) == 3
        line = capsys.readouterr().err
        assert f"{weights} has other weights than those for which the adapter" in line
        assert line.count("\n") == 1
    assert not (tmp_path / "other").exists()
    for changes in ({"rank": 0}, {}):
        with pytest.raises(DataError, match="has other weights than those for which the adapter"):
            starting_model(adapted(run / "export", adapter=changes))
    made(weights, seed=5)
    assert cli.main(asked) == 0


def test_an_adapter_names_the_commit_of_its_base_and_is_read_with_it(tmp_path, monkeypatch):
    root = tmp_path / "hub" / "models--somebody--llama"
    for digit in "01":
        made(root / "snapshots" / (40 * digit), seed=int(digit))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(40 * "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert hf.base_of("somebody/llama")["revision"] == 40 * "1"
    network = BYTES.clone(adapter=Adapter(2, 3.0))
    adapter, _ = drawn(network)
    base = hf.base_of("somebody/llama", 40 * "0")
    hf.save_adapter(adapter, tmp_path / "adapter", None, network=network, base=base)
    assert hf.base_of(str(tmp_path / "adapter")) == base
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("somebody/llama", 40 * "0")
    _, found = split_adapter(hf.load(tmp_path / "adapter").params)
    assert_equal(found, hf.load(root / "snapshots" / (40 * "0")).params)


def test_learners_of_ray_are_sent_the_adapter_alone(
    after_one_round, weights, monkeypatch, tmp_path
):
    there = Here(monkeypatch, lambda *_: "response")
    config = in_one_round(weights, engine={"kind": "ray", "steps": "equal"})
    assert_close(train(config, tmp_path / "r").params, after_one_round, rtol=1e-4, atol=1e-6)
    assert there.given.base.params is None and there.given.base.fingerprint
    given = [array_bytes(arguments) for _, _, arguments in there.calls.values()]
    assert 1_000 < max(given) < 10_000  # a base has 29 kB, an adapter 1.2 kB


def test_learners_read_the_base_by_themselves_and_send_the_adapter(
    after_one_round, weights, monkeypatch, tmp_path
):
    there = InBucket(monkeypatch, tmp_path / "bucket")
    engine = {"kind": "bucket", "address": there.url, "steps": "equal"}
    config = in_one_round(weights, engine=engine)
    sizes, put = [], store.Store.put

    def counted(self, name, data):
        sizes.append(len(data))
        return put(self, name, data)

    monkeypatch.setattr(store.Store, "put", counted)
    assert_close(train(config, tmp_path / "r").params, after_one_round, rtol=1e-4, atol=1e-6)
    assert max(sizes) < 10_000  # a base has 29 kB, an adapter 1.2 kB
    path = tmp_path / "bucket" / "run.json"
    signing = Signatures(KEY)
    message = json.loads(signing.verified_content("run.json", path.read_bytes()))["message"]
    other = store.to_json(RunDescription(**message | {"base": "other"}))
    path.write_bytes(signing.signed("run.json", other))
    with pytest.raises(ConfigError, match="the driver has other base weights than this machine"):
        join(there.url, own={"model.init_from": str(weights)})
