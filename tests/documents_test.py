"""Attention within documents: losses and gradients of packed rows are those of documents alone."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from nets import FAMILY, LLAMA, flat, loss_of, make_params, make_rows, tapped_grad

from adloco_jax.config import validate
from adloco_jax.engine.spec import Machine
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.models import Llama, sequence_losses
from adloco_jax.models.layers import param_shapes
from adloco_jax.run.assemble import attention, build_network, load_data
from adloco_jax.run.folder import completed, recorded_values
from adloco_jax.run.plan import plan
from adloco_jax.training import fit, train

LENGTH = 36  # two blocks of queries
SEPARATOR = 5
MODELS = {
    "family": FAMILY.clone(max_length=LENGTH),
    "window": Llama(**LLAMA | {"max_length": 2 * LENGTH, "window": LENGTH}),
}
DOCUMENT = {"attention": "document"}


def packed_rows(model):
    """Rows of 2, 1, 1 and 5 documents: one empty, and separators at both ends of rows."""
    rows = make_rows(model, batch=4, length=LENGTH)
    rows[1:][rows[1:] == SEPARATOR] = 0
    rows[2, [0, LENGTH]] = SEPARATOR
    rows[3, [3, 4, 20, 33]] = SEPARATOR
    return jnp.asarray(rows)


def documents_alone(rows):
    """For each document: its row, its tokens with the next separator (padded), and their number."""
    found = []
    for number, row in enumerate(rows):
        starts = [t for t in range(LENGTH) if t == 0 or row[t] == SEPARATOR]
        for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            tokens = np.zeros(LENGTH + 1, np.int32)
            tokens[: end + 1 - start] = row[start : end + 1]
            found.append((number, tokens, end - start))
    return map(jnp.array, zip(*found, strict=True))


def loss_sum(model, params, tokens, count):
    """The sum of the losses of one document."""
    logits_LV = model.apply({"params": params}, tokens[None, :-1])[0]
    picked_L = jnp.take_along_axis(jax.nn.log_softmax(logits_LV), tokens[1:, None], axis=1)[:, 0]
    return -jnp.sum(picked_L, where=jnp.arange(LENGTH) < count)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_is_the_token_weighted_sum_of_its_documents(name):
    plain = MODELS[name]
    model = plain.clone(separator=SEPARATOR, layer_form="call" if name == "window" else "scan")
    params, direction, rows = make_params(plain), make_params(plain, 1), packed_rows(plain)
    number_D, *documents = documents_alone(rows)
    assert np.bincount(number_D).tolist() == [2, 1, 1, 5]
    alone = jax.value_and_grad(functools.partial(loss_sum, plain))
    sums_D, grads_D = jax.jit(jax.vmap(alone, in_axes=(None, 0, 0)))(params, *documents)
    weights_BD = (np.asarray(number_D)[None] == np.arange(len(rows))[:, None]) / LENGTH
    losses_B, grads_B = weights_BD @ np.float64(sums_D), weights_BD @ flat(grads_D, axes=1)

    def assert_close(actual, expected):
        assert np.max(np.abs(actual - expected)) < 1e-5 * np.max(np.abs(expected))

    losses_fn, loss_fn = sequence_losses(model), loss_of(model)
    forward = jax.jit(lambda p, d: jax.jvp(lambda p: losses_fn(p, rows), (p,), (d,)))
    losses, slopes = forward(params, direction)
    assert_close(losses, losses_B)
    assert_close(slopes, grads_B @ flat(direction))
    of_examples = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))
    assert_close(flat(of_examples(params, rows[:, None]), axes=1), grads_B)
    mean, norms_B = tapped_grad(model)(params, rows, jnp.zeros(len(rows)))
    assert_close(flat(mean), grads_B.mean(axis=0))
    assert_close(len(rows) ** 2 * norms_B, np.square(grads_B).sum(axis=1))


def test_rows_without_separators_run_the_program_that_knows_none():
    """Its masks are constants."""
    plain = MODELS["window"]
    params, rows = make_params(plain), packed_rows(plain)
    parted = loss_of(plain.clone(separator=SEPARATOR))
    found = [
        set(re.findall(r"= (cummax|ge|le|and)\b", str(jax.make_jaxpr(loss_fn)(params, rows))))
        for loss_fn in (loss_of(plain), parted)
    ]
    assert found == [set(), {"cummax", "le", "and"}]
    whole = np.where(rows == SEPARATOR, 0, rows)
    assert jax.jit(parted)(params, whole) == jax.jit(loss_of(plain))(params, whole)


def test_a_run_separates_documents_at_the_end_of_text(tmp_path, capsys):
    config = toy.tiny_config(data=DOCUMENT | {"sequence_length": 16, "num_sequences": 200})
    whole = completed(validate(config))
    assert build_network(whole).separator == 256
    assert build_network(completed(validate(toy.tiny_config()))).separator is None
    assert "attention by xla within documents" in plan(config)
    train(config, tmp_path)
    assert "attention by xla within documents" in capsys.readouterr().out
    assert recorded_values(tmp_path / "config.json").data.separator == 256


def test_what_has_no_documents_is_refused_in_a_line(tmp_path):
    settings = toy.settings_of(data=DOCUMENT | {"sequence_length": toy.LENGTH})
    functions = {"init_fn": toy.init_fn, "loss_fn": toy.bigram_loss}
    with pytest.raises(ConfigError, match="^data.attention = 'document': loss_fn"):
        fit(settings, workdir=tmp_path, corpus=toy.corpus(), **functions)
    (tmp_path / "one.txt").write_text("to be or not to be\n" * 200)
    one = {"source": "text", "path": str(tmp_path / "one.txt"), "sequence_length": 16}
    with pytest.raises(DataError, match=r"one\.txt: a single document to train on"):
        load_data(validate(toy.tiny_config(data=DOCUMENT | one)))


def test_cudnn_computes_no_attention_within_documents():
    gpu = Machine((types.SimpleNamespace(platform="gpu", compute_capability="9.0"),), 0)
    settings = toy.settings_of(model={"dtype": "bfloat16"})
    document = settings.data.model_copy(update=DOCUMENT)
    assert attention(settings, gpu) == "cudnn"
    assert attention(settings.model_copy(update={"data": document}), gpu) == "xla"
    with pytest.raises(ValueError, match="'cudnn' separates no documents"):
        param_shapes(Llama(**LLAMA, separator=0, attention="cudnn"))
