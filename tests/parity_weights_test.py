"""Weights that PyTorch wrote: a pytorch_model.bin is checked like safetensors."""

from pathlib import Path

import numpy as np
import pytest
from hf_test import GAIN, NETWORK, assert_same, drawn, refused
from safetensors.numpy import load_file

from adloco_jax import hf
from adloco_jax.errors import ConfigError

torch = pytest.importorskip("torch")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A sound checkpoint."""
    hf.save(drawn(NETWORK), tmp_path / "llama", network=NETWORK)
    return tmp_path / "llama"


def pickled(folder: Path, tensors: dict) -> None:
    """Replaces the weights by a pytorch_model.bin."""
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_pytorch_alone_are_read_and_checked_like_others(folder, dtype):
    hf.save(drawn(NETWORK), folder, network=NETWORK, dtype=dtype)
    expected = hf.load(folder)
    kind = getattr(torch, dtype)
    tensors = {
        name: torch.nn.Parameter(torch.tensor(array.astype(np.float32)).to(kind))
        for name, array in load_file(folder / "model.safetensors").items()
    }
    pickled(folder, tensors)
    assert_same(hf.load(folder).params, expected.params)
    assert hf.load(folder).stored_as == (dtype,)
    pickled(folder, tensors | {GAIN: torch.ones(12, dtype=torch.int8)})
    assert f"pytorch_model.bin: {GAIN}: have int8, want a float type" in refused(folder)
    pickled(folder, tensors | {GAIN: torch.eye(12).to_sparse()})
    assert f"need a mapping from names to tensors, have {GAIN!r}" in refused(folder)
    pickled(folder, {"model": tensors})
    assert "need a mapping from names to tensors, have 'model'" in refused(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    assert "pytorch_model.bin: damaged, or holds more than tensors" in refused(folder)


def test_without_pytorch_a_line_names_the_extra(folder, monkeypatch):
    pickled(folder, {})
    monkeypatch.setattr(hf, "_has_torch", lambda: False)
    assert "pip install torch" in refused(folder, ConfigError)
    monkeypatch.undo()
    # weights_only was not safe in this version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.5.1+cpu")
    assert "PyTorch 2.5.1+cpu is installed" in refused(folder, ConfigError)
