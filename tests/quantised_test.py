"""Frozen weights in four and eight bits: reading, layers, and what is chosen or refused."""

import dataclasses
import functools
import io
import json
import math
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from trees import assert_close

from adloco_jax.cli import look
from adloco_jax.config import completed, default_config, validate
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.elastic import child
from adloco_jax.elastic.child import as_own_learner_fits
from adloco_jax.engine import memory
from adloco_jax.engine.evaluate import loss_key
from adloco_jax.engine.fitting import base_dtype_line, fitting_choice
from adloco_jax.engine.model import configured_model, program_spec
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.spec import Machine, num_bytes, num_values, this_machine
from adloco_jax.errors import ConfigError, DataError, ResourceError
from adloco_jax.models import Llama, hf, llama
from adloco_jax.models.layers import Adapter, split_adapter
from adloco_jax.models.llama import next_token_loss
from adloco_jax.models.quantised import dequantised, is_quantised, quantise, unpacked
from adloco_jax.row_batch import RowBatch
from adloco_jax.run.before import assemble

SIZES = dict(width=64, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=96)
PLAIN = Llama(**SIZES, vocab_size=257, max_length=32)
NETWORK = PLAIN.clone(adapter=Adapter(2, 3.0), layer_form="call")
ROWS = jnp.asarray(np.random.default_rng(0).integers(0, 257, (3, 9)), jnp.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a random model that reads bytes."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    params = jax.jit(PLAIN.init)(jax.random.key(5), ROWS[:, :-1])["params"]
    hf.save(params, folder, load_tokenizer("bytes"), network=PLAIN)
    return folder


@pytest.fixture(scope="module")
def adapter():
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(NETWORK.init, jax.random.key(0), ROWS[:, :-1])["params"]
    low_rank, _ = split_adapter(shapes)
    return jax.tree.map(lambda x: np.float32(0.1 * rng.normal(size=x.shape)), low_rank)


@functools.cache
def held(folder, base_dtype):
    loaded = hf.load(folder, base_dtype=base_dtype)
    return loaded._replace(base=jax.tree.map(jnp.asarray, loaded.base))


@jax.jit
def written_out(base):
    """The same frozen weights as arrays of float32."""

    def as_array(leaf):
        return dequantised(leaf).astype(jnp.float32)

    return jax.tree.map(as_array, base, is_leaf=is_quantised)


@pytest.mark.parametrize(("kind", "error"), [("nf4", 0.092), ("int8", 0.0061)])
def test_a_matrix_has_a_scale_for_64_numbers_of_a_column(kind, error):
    w_DF = np.random.default_rng(0).normal(size=(192, 40)).astype(np.float32)
    quantised = quantise(w_DF, kind)
    assert quantised.scales.shape == (3, 40) and quantised.scales.dtype == jnp.float32
    assert unpacked(quantised).dtype == {"nf4": jnp.uint4, "int8": jnp.int8}[kind]
    gap = np.linalg.norm(dequantised(quantised) - w_DF) / np.linalg.norm(w_DF)
    np.testing.assert_allclose(gap, error, rtol=0.05)
    assert quantise(w_DF[:48], kind).scales.shape == (3, 40)  # 16 divides 48
    odd = quantise(w_DF[:, :39], kind)
    np.testing.assert_array_equal(dequantised(odd), dequantised(quantised)[:, :39])
    assert odd.shape == (192, 39)


def test_matrices_of_layers_alone_are_quantised_and_the_hash_is_that_of_the_file(folder):
    nf4, wide = held(folder, "nf4"), held(folder, "float32")
    for path, leaf in flatten_dict(nf4.base).items():
        is_matrix = path[0] == "layers" and path[-1] == "kernel"
        parts = leaf if path[0] == "layers" else [leaf]
        assert all(is_quantised(part) == is_matrix for part in parts)
        assert is_matrix or all(part.dtype == jnp.bfloat16 for part in parts)
    assert nf4.sha256 == wide.sha256 == hf.load(folder).sha256 != ""
    count = sum(leaf.size for leaf in jax.tree.leaves(wide.base))
    assert num_values(nf4.base) == count
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    scales = 2 * (2 * 64 + 2 * 32 + 2 * 96 + 3 * 64)  # 32 divides 96
    assert num_bytes(nf4.base) == matrices // 2 + 4 * scales + 2 * (count - matrices)


def test_a_program_takes_two_codes_a_byte(folder):
    base = held(folder, "nf4").base
    program = jax.jit(lambda base: jax.tree.map(jnp.sum, written_out(base))).lower(base).compile()
    found = program.memory_analysis().argument_size_in_bytes
    assert num_bytes(base) <= found < 1.05 * num_bytes(base)


@pytest.mark.usefixtures("one_device")
def test_a_runs_programs_take_the_codes_that_a_device_holds(folder, adapter):
    """Held-out losses of `model.loss_chunk` rows at once are those of all, in less memory."""
    rows = np.random.default_rng(1).integers(0, 257, (30, 17)).astype(np.int32)
    losses, temporaries = [], []
    for chunk in (0, 4):
        config = config_of(folder)
        config.model.base_dtype, config.adapter.alpha = "nf4", 3.0
        config.model.loss_chunk = chunk
        settings = completed(validate(config))
        spec = program_spec(settings, configured_model(settings, this_machine()), this_machine())
        programs = Programs(spec)
        programs.set_frozen(held(folder, "nf4").base)
        key = loss_key(len(rows))
        losses.append(programs.call(key, adapter, rows))
        temporaries.append(programs[key].memory_analysis().temp_size_in_bytes)
        programs.close()
    base = written_out(held(folder, "nf4").base)
    wanted = jax.jit(next_token_loss(NETWORK))(adapter, jnp.asarray(rows), base=base)
    np.testing.assert_allclose(np.mean(losses[0]), wanted, rtol=1e-5)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert temporaries[1] < temporaries[0] / 2


@pytest.mark.slow
def test_a_row_of_8192_tokens_of_packed_chats_is_trained_in_parts():
    """Recomputed layers and a divided head give the gradients of the whole, in less memory."""
    length, vocab_size = 8192, 20_000
    plain = Llama(**SIZES, vocab_size=vocab_size, max_length=length)
    network = plain.clone(adapter=Adapter(2, 3.0), layer_form="call")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (1, length + 1), np.int32)
    starts = np.arange(length + 1, dtype=np.int32)[None] // 1000 * 1000
    weights = (rng.random((1, length + 1)) < 0.3).astype(np.float32) / (0.3 * length)
    rows = RowBatch(tokens, starts, weights)
    drawn = jax.jit(network.init)(jax.random.key(0), tokens[:, :8])["params"]
    low_rank, base = split_adapter(drawn)
    low_rank = jax.tree.map(lambda x: x + 0.05, low_rank)
    base = hf.as_held(base, "nf4")
    results, temporaries = [], []
    for chunk, remat in ((0, False), (1, True)):
        loss_fn = next_token_loss(network.clone(remat=remat), sequences_per_chunk=chunk)
        program = jax.jit(jax.value_and_grad(loss_fn)).lower(low_rank, rows, None, base).compile()
        results.append(program(low_rank, rows, None, base))
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-7)
    assert temporaries[1] < 0.7 * temporaries[0]


def test_gradients_and_their_norms_are_those_of_the_dequantised_weights(folder, adapter):
    base = held(folder, "nf4").base
    loss_fn = next_token_loss(NETWORK.clone(remat=True))  # dequantised in both passes
    pair = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), adapter)  # of workers that go at once
    backward = jax.vmap(jax.grad(loss_fn, argnums=(0, 2)), in_axes=(0, None, None, None))
    taps_B = jnp.zeros(len(ROWS))
    found, wanted = (
        jax.jit(backward)(pair, ROWS, taps_B, each) for each in (base, written_out(base))
    )
    assert_close(found, wanted, rtol=1e-4, atol=1e-7)


def test_text_is_written_with_codes(folder, adapter):
    base = held(folder, "nf4").base
    how = {"num_tokens": 4, "temperature": 0.0, "key": jax.random.key(0)}
    texts = [
        llama.generate(NETWORK, adapter, ROWS[:1], base=each, **how)
        for each in (base, written_out(base))
    ]
    np.testing.assert_array_equal(*texts)


def config_of(folder, **groups):
    config = default_config()
    config.model.init_from, config.adapter.rank = str(folder), 2
    config.data.sequence_length = 16
    config.batching.update({"test": "constant", "initial_batch_size": 1})
    config.ensemble.update({"num_trainers": 1, "num_workers": 1})
    config.update(groups)
    return config


def machine_for_nf4(settings):
    """A machine in whose memory bfloat16 has no room."""
    roomy = Machine(this_machine().devices, 2**30)

    def needed(dtype):
        model = settings.model.model_copy(update={"base_dtype": dtype})
        chosen = settings.model_copy(update={"model": model})
        spec = program_spec(chosen, configured_model(chosen, roomy), roomy)
        return memory.least_state_bytes(spec, (1,))

    between = math.ceil((needed("bfloat16") + needed("nf4")) / 2 / 0.8)
    return dataclasses.replace(roomy, device_bytes=between)


@pytest.mark.usefixtures("one_device")
def test_unset_frozen_weights_are_bfloat16_if_these_fit_else_nf4(folder):
    settings = completed(validate(config_of(folder)))
    small = machine_for_nf4(settings)
    for machine, dtype in (
        (dataclasses.replace(small, device_bytes=2**30), "bfloat16"),
        (small, "nf4"),
    ):
        found, choice = fitting_choice(settings, machine)
        choice.programs.close()
        assert found.model.base_dtype == dtype
        assert f"model.base_dtype={dtype}" in base_dtype_line(found)


@pytest.mark.usefixtures("one_device")
def test_a_driver_asks_a_process_that_sees_the_accelerator_of_its_learner(
    folder, monkeypatch, capsys
):
    engine = {"kind": "direct", "relay": "off"}
    settings = completed(validate(config_of(folder, engine=engine)))
    small = machine_for_nf4(settings)
    monkeypatch.setattr(look, "this_machine", lambda: small)
    monkeypatch.setattr(child, "executed", [])  # other tests' configs may be gone

    def run_here(command, *, input, **how):
        assert command[1:] == ["-P", "-m", "adloco_jax.cli.look"]
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(input.encode())))
        code = look.main()
        return subprocess.CompletedProcess(command, code, capsys.readouterr().out)

    monkeypatch.setattr(subprocess, "run", run_here)
    found = as_own_learner_fits(settings)
    assert (found.model.base_dtype, found.model.remat) == ("nf4", False)
    with_remat = settings.model.model_copy(update={"remat": True})
    assert (
        as_own_learner_fits(settings.model_copy(update={"model": with_remat})).model.remat is True
    )

    def nothing_fits(settings, machine):
        raise ResourceError("no room")

    monkeypatch.setattr(look, "fitting_choice", nothing_fits)
    with pytest.raises(ResourceError, match=r"model\.base_dtype: .* set it \(no room\)"):
        as_own_learner_fits(settings)


@pytest.mark.usefixtures("one_device")
def test_a_driver_plans_for_the_devices_of_its_learner(folder, tmp_path, monkeypatch):
    engine = {"kind": "direct", "relay": "off"}
    settings = completed(validate(config_of(folder, engine=engine)))

    def found_by_the_learner(settings):
        model = settings.model.model_copy(update={"base_dtype": "nf4"})
        return settings.model_copy(update={"model": model})

    monkeypatch.setattr(assemble, "as_own_learner_fits", found_by_the_learner)
    run = assemble.assemble(settings, this_machine(), tmp_path / "run", trains=True)
    assert run.settings.model.base_dtype == "nf4"  # this process has room for bfloat16


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"adapter": {"rank": 0}}, "model.base_dtype = 'nf4', adapter.rank = 0: only frozen"),
        (
            {"adapter": {"rank": 0}, "model": {"init_from": ""}},
            "model.base_dtype = 'nf4', adapter.rank = 0: random weights cannot be quantised",
        ),
    ],
)
def test_quantised_weights_without_an_adapter_are_refused(folder, changes, fault):
    config = config_of(folder)
    config.update(changes)
    config.model.base_dtype = "nf4"
    with pytest.raises(ConfigError, match=fault):
        validate(config)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes"])
def test_a_quantised_checkpoint_is_refused_by_name(folder, tmp_path, method):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    need = f"quantised by {method}, need those from which they were made, and model.base_dtype=nf4"
    for read in (hf.load, hf.inspect):
        with pytest.raises(DataError, match=need):
            read(tmp_path)
