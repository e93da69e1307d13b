"""The parts of studies/chat.py and studies/apart.py that their figures rest on."""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from studies import apart, chat


def test_a_model_between_two_has_the_loss_wanted():
    high, low = {"w": jnp.array([3.0, 0.0])}, {"w": jnp.array([1.0, 0.0])}
    params, loss = chat.between(high, low, lambda params: jnp.sum(params["w"] ** 2), 4.0)
    assert params["w"][0] == pytest.approx(2, abs=0.01) and loss == pytest.approx(4, abs=0.05)
    assert loss <= 4


@pytest.mark.parametrize(
    ("values", "share"), [([1, 1, 1, 1], 1), ([10, 1, 1, 1], 0.25), ([2, 2, 1, 0], 0.75)]
)
def test_rank_is_the_share_of_singular_values_with_nine_tenths_of_the_square(values, share):
    turned = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    assert chat.rank(turned @ np.diag(values) @ turned.T) == share


@pytest.fixture
def chats(tmp_path):
    pairs = [("What is it?", "A dog."), ("And this?", "A hen."), ("x" * 100, "y" * 100)]
    roles = ("user", "assistant")
    lines = [
        [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]
        for pair in pairs
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": turns}) for turns in lines))
    return chat.read_chats(path)


def test_answers_and_their_ends_count_and_long_chats_are_left_out(chats):
    assert len(chats.rows) == 2
    targets, counted = chats.rows[0, 1:], chats.answers[0].astype(bool)
    assert targets[counted].tolist() == [*b"A dog.", chat.END]
    assert bytes(targets[chats.questions[0].astype(bool)].tolist()) == b"hat is it?\n"


def test_an_answer_is_exact_if_greedy_decoding_gives_it(chats):
    """A stand-in whose most likely byte is always the next one of the first chat."""
    next_of_first = jnp.asarray(chats.rows[0, 1:])

    def apply(variables, tokens):
        sharp = variables["params"] * jax.nn.one_hot(next_of_first, 257)
        return jnp.broadcast_to(sharp, (*tokens.shape, 257))

    network = type("Network", (), {"apply": staticmethod(apply)})()
    assert chat.judge(network, jnp.float32(0), chats)["answers"] == pytest.approx(math.log(257))
    judged = chat.judge(network, jnp.float32(50), chats)
    assert (judged["exact"], judged["of"]) == (1, 2)


def test_both_arms_read_the_same_rows_and_apart_each_worker_has_one_text():
    def corpus(text):
        def batch(trainer, stream, start, count):
            return np.array([[text, stream, start]])

        return SimpleNamespace(batch=batch, heldout_rows=np.zeros((2, 3)), fingerprint="")

    read = {}
    for is_apart in (False, True):
        texts = apart.Texts([corpus(text) for text in range(4)], is_apart=is_apart)
        read[is_apart] = [texts.batch(0, worker, 4, 8) for worker in range(4)]
    of_mixed, of_apart = (sorted(map(tuple, np.concatenate(rows))) for rows in read.values())
    assert of_mixed == of_apart and len({*of_mixed}) == 32
    assert all({*rows[:, 0]} == {worker} for worker, rows in enumerate(read[True]))
    assert all({*rows[:4, 0]} == {0, 1, 2, 3} for rows in read[False])
