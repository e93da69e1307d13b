"""The benchmark gives PyTorch and this library the same work; needs the `parity` extra."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (the parity extra)")

import side_by_side

from adloco_jax import hf


def test_both_train_the_same_models_by_the_same_steps(tmp_path):
    sizes = {"vocab_size": 257, "width": 32, "num_layers": 2, "mlp_width": 56}
    model = sizes | {"num_heads": 4, "num_kv_heads": 2}
    shape = side_by_side.Shape(model, sequence_length=40, num_steps=5)
    settings = side_by_side.settings_of(shape)
    tokens = side_by_side.random_tokens(shape, 3, 2)
    side_by_side.save_weights(settings, str(tmp_path))
    ours = side_by_side.InnerSteps(settings, tokens, hf.load(tmp_path).params)
    theirs = side_by_side.torch_steps(settings, tokens, str(tmp_path))
    for _ in range(3):  # each call continues where the last one ended
        np.testing.assert_allclose(ours(), theirs(), rtol=1e-5)
