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
from texts import save_byte_tokenizer, write_documents
from toy import data_settings
from trees import assert_close

from adloco_jax.config import validate
from adloco_jax.data import load_corpus
from adloco_jax.data.prepared import DocumentRows
from adloco_jax.engine.model import configured_model, spec_of
from adloco_jax.engine.spec import Machine, this_machine
from adloco_jax.errors import ConfigError
from adloco_jax.models import Llama, sequence_losses
from adloco_jax.models.kernels import ATTENTION
from adloco_jax.row_batch import RowBatch
from adloco_jax.run.before.estimate import plan
from adloco_jax.training import fit

LENGTH = 36  # two blocks of queries
WIDTH = LENGTH + 1
# Of four rows, the positions at which documents begin: one is empty, one the last target.
BEGIN = ([9], [], [0, LENGTH], [3, 4, 20, 33])
MODELS = {
    "family": FAMILY.clone(max_length=LENGTH),
    "window": Llama(**LLAMA | {"max_length": 2 * LENGTH, "window": 7}),
}
DOCUMENT = {"attention": "document"}


PARTS = {"family": 3, "window": 2}  # of a row: with weights, as chats have, and without


def packed_rows(model, parts=2):
    """Rows of 2, 1, 1 and 5 documents, and which tokens count."""
    tokens = make_rows(model, batch=4, length=LENGTH)
    starts = [row * WIDTH + t for row, begin in enumerate(BEGIN) for t in begin]
    counts = np.random.default_rng(0).random(tokens.shape) < (0.5 if parts == 3 else 2)
    counts[:, 0] = False
    rows = DocumentRows(tokens, np.array(starts), counts if parts == 3 else None)
    return jax.tree.map(jnp.asarray, rows[np.arange(4)]), counts


def documents_alone(rows, counts):
    """For each document: its row, its tokens with the next separator (padded), and which count."""
    found = []
    for number, row in enumerate(rows.tokens):
        starts = sorted({0, *BEGIN[number]} - {LENGTH})
        for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            tokens, weights = np.zeros((2, WIDTH), np.int32)
            tokens[: end + 1 - start] = row[start : end + 1]
            weights[1 : end + 1 - start] = counts[number, start + 1 : end + 1]
            found.append((number, tokens, weights))
    return map(jnp.array, zip(*found, strict=True))


def loss_sum(model, params, tokens, weights):
    """The sum of the losses of the tokens of one document that count."""
    logits_LV = model.apply({"params": params}, tokens[None, :-1])[0]
    picked_L = jnp.take_along_axis(jax.nn.log_softmax(logits_LV), tokens[1:, None], axis=1)[:, 0]
    return -jnp.sum(picked_L, where=weights[1:] > 0)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_is_the_weighted_sum_of_its_documents(name):
    plain, parts = MODELS[name], PARTS[name]
    model = plain.clone(layer_form="call" if name == "window" else "scan")
    params, direction = make_params(plain), make_params(plain, 1)
    rows, counts = packed_rows(plain, parts)
    number_D, *documents = documents_alone(rows, counts)
    assert np.bincount(number_D).tolist() == [2, 1, 1, 5]
    alone = jax.value_and_grad(functools.partial(loss_sum, plain))
    sums_D, grads_D = jax.jit(jax.vmap(alone, in_axes=(None, 0, 0)))(params, *documents)
    num_rows = len(rows.tokens)
    weights_BD = np.asarray(number_D)[None] == np.arange(num_rows)[:, None]
    weights_BD = weights_BD * num_rows / counts.sum()
    losses_B, grads_B = weights_BD @ np.float64(sums_D), weights_BD @ flat(grads_D, axes=1)

    def assert_close(actual, expected):
        assert np.max(np.abs(actual - expected)) < 1e-5 * np.max(np.abs(expected))

    losses_fn = sequence_losses(model)
    forward = jax.jit(lambda p, d: jax.jvp(lambda p: losses_fn(p, rows), (p,), (d,)))
    losses, slopes = forward(params, direction)
    assert_close(losses, losses_B)
    assert_close(slopes, grads_B @ flat(direction))
    mean, norms_B = tapped_grad(model)(params, rows, jnp.zeros(num_rows))
    assert_close(flat(mean), grads_B.mean(axis=0))
    assert_close(num_rows**2 * norms_B, np.square(grads_B).sum(axis=1))


def test_attention_over_rows_runs_the_program_that_knows_no_documents():
    """Its masks are constants."""
    model = MODELS["window"].clone(window=None)
    params, (rows, _) = make_params(model), packed_rows(model)
    whole = rows.replace(starts=jnp.zeros_like(rows.starts))
    loss_fn = loss_of(model)
    found = [
        set(re.findall(r"= (ge|le|and)\b", str(jax.make_jaxpr(loss_fn)(params, given))))
        for given in (rows.tokens, RowBatch(rows.tokens), whole)
    ]
    assert found == [set(), set(), {"le", "and"}]
    assert jax.jit(loss_fn)(params, whole) == jax.jit(loss_fn)(params, rows.tokens)
    with pytest.raises(ValueError, match=r"rows has shape \(4, 1\), expected \[B, L\+1\]"):
        loss_fn(params, rows.tokens[:, :1])


IM = ("<|im_start|>", "<|im_end|>")


def chat(number):
    turns = (("user", f"Twice {number}?"), ("assistant", f"It is {2 * number}."))
    return "\n".join(f"{IM[0]}{role}\n{text}{IM[1]}" for role, text in turns)


@pytest.fixture
def chats(tmp_path):
    """Chats whose turns end with the end-of-text token, and their rows."""
    names = {"eos_token": IM[1], "pad_token": "<|endoftext|>", "additional_special_tokens": [IM[0]]}
    save_byte_tokenizer(tmp_path / "t", **names)
    path = write_documents(tmp_path, [chat(number) for number in range(60)])
    given = {"source": "jsonl", "path": str(path), "tokenizer": str(tmp_path / "t")}
    return data_settings(vocab_size=259, sequence_length=200, heldout_frac=0.2, **given | DOCUMENT)


def test_a_turn_of_a_chat_sees_the_turns_before_it_and_no_other_chat(chats):
    corpus = load_corpus(chats, note=lambda line: None)
    row = corpus.rows[np.array([1])]
    tokens, starts = row.tokens[:, :200], row.starts[:, :200]
    parts = np.split(tokens[0], np.unique(starts)[1:])
    # After the end of the chat before; its own end is that before the next one.
    texts = {IM[1] + chat(number).removesuffix(IM[1]) for number in range(60)}
    assert len(parts) > 4 and texts.issuperset(map(corpus.tokenizer.decode, parts[1:-1]))
    network = MODELS["window"].clone(vocab_size=259, window=None, max_length=200)
    logits = jax.jit(functools.partial(network.apply, {"params": make_params(network)}))
    question, other = corpus.tokenizer.encode_batch(["?!"])[0]
    start, end = len(parts[0]), len(parts[0]) + len(parts[1])
    asked = start + parts[1].tolist().index(question)
    changed = tokens.copy()
    changed[0, asked] = other
    before, after = (logits(each, starts_BL=starts) for each in (tokens, changed))
    moved = np.flatnonzero(np.abs(before - after).max(axis=(0, 2)))
    assert moved.tolist() == [*range(asked, end)]


def test_a_run_limits_attention_to_documents(tmp_path, capsys):
    path = write_documents(tmp_path, [f"<{number}>" for number in range(600)])
    given = {"source": "jsonl", "path": str(path), "sequence_length": 16}
    config = toy.tiny_config(data=DOCUMENT | given)
    config.eval.sample_tokens = 4
    spec = spec_of(validate(config), this_machine())
    assert spec.sequence_length == 16
    assert (spec.row.tokens.shape, spec.row.starts.shape, spec.row.weights) == ((17,), (17,), None)
    assert "attention by xla within documents" in plan(config)


@pytest.mark.parametrize("data", [DOCUMENT, {"text_column": "messages"}], ids=str)
def test_what_has_no_documents_is_refused_in_a_line(tmp_path, data):
    given = {"source": "jsonl", "path": "x", "sequence_length": toy.LENGTH}
    settings = toy.settings_of(data=given | data)
    functions = {"init_fn": toy.init_fn, "loss_fn": toy.bigram_loss}
    with pytest.raises(ConfigError, match="^data.attention, text_column: loss_fn"):
        fit(settings, workdir=tmp_path, corpus=toy.corpus(), **functions)


def test_cudnn_attends_within_documents_by_a_mask(monkeypatch):
    gpu = Machine((types.SimpleNamespace(platform="gpu", compute_capability="9.0"),), 0)
    settings = toy.settings_of(model={"dtype": "bfloat16"}, data=DOCUMENT)
    assert configured_model(settings, gpu).attention(1) == "cudnn"
    odd = settings.data.model_copy(update={"sequence_length": 7})  # refused with a mask
    settings = settings.model_copy(update={"data": odd})
    assert configured_model(settings, gpu).attention(1) == "xla"


def test_cudnn_within_documents_shares_a_mask_among_heads_and_workers_share_a_batch(monkeypatch):
    """As `attend`, with its gradients, also of workers that go at once."""
    attend, masks = jax.nn.dot_product_attention, set()

    def on_a_cpu(*arrays, implementation, mask, **how):
        masks.add(mask.shape)
        return attend(*arrays, implementation="xla", mask=mask, **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_a_cpu)
    rng = np.random.default_rng(0)
    heads = [jnp.asarray(rng.normal(size=(3, 2, n, 6, 8)), jnp.float32) for n in (4, 2, 2)]
    starts_BL = jnp.array([[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 4, 4]])
    results = []
    for name in ("cudnn", "xla"):

        def loss(heads_BnLK, name=name):
            return jnp.sum(jnp.sin(ATTENTION[name](*heads_BnLK, starts_BL)))

        one = jax.jit(jax.value_and_grad(loss))([array[0] for array in heads])
        all_at_once = jax.jit(jax.vmap(jax.value_and_grad(loss)))(heads)
        results.append((one, all_at_once))
    assert_close(*results, rtol=1e-4, atol=1e-5)
    assert masks == {(2, 1, 6, 6), (6, 1, 6, 6)}


def test_cudnn_divides_rows_with_one_window_over_the_devices_of_a_worker(monkeypatch):
    """A window without documents has starts [1, L], which the rows of all devices share."""
    attend = jax.nn.dot_product_attention

    def on_a_cpu(*arrays, implementation, **how):
        return attend(*arrays, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_a_cpu)
    rng = np.random.default_rng(0)
    heads = [jnp.asarray(rng.normal(size=(8, n, 6, 8)), jnp.float32) for n in (4, 2, 2)]
    starts_1L = jnp.array([[0, 0, 0, 1, 2, 3]])
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("workers", "shards"))

    def sharded(*heads_BnLK):
        return ATTENTION["cudnn"](*heads_BnLK, starts_1L)

    rows = jax.sharding.PartitionSpec("workers")
    sharded = jax.shard_map(
        sharded, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"workers"}, check_vma=False
    )
    assert_close(jax.jit(sharded)(*heads), ATTENTION["xla"](*heads, starts_1L), atol=1e-5)
