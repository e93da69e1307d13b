"""Runs that start from a checkpoint, models exported from a run's folder, generated text."""

import dataclasses
import json
import re
import shutil
import types

import jax
import numpy as np
import pytest
from nets import config_of
from toy import data_settings, tiny_config, with_its_weights
from transformers import AutoTokenizer
from trees import assert_close, assert_equal

from adloco_jax import main as cli
from adloco_jax.config import completed, validate
from adloco_jax.data.corpus import load_corpus, readable
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.engine.spec import this_machine
from adloco_jax.errors import CheckpointError, ConfigError, DataError
from adloco_jax.models import hf, llama
from adloco_jax.models.configured import build_network
from adloco_jax.models.layers import param_shapes
from adloco_jax.run import attempts
from adloco_jax.run.kept.export import read_trained, write_consensus
from adloco_jax.run.kept.ledger import read
from adloco_jax.settings import OPTIONS, SIZES
from adloco_jax.training import train

pytestmark = pytest.mark.usefixtures("one_device")


def tiny(**model):
    """A config of one short round of two trainers; `model` overrides its sizes."""
    two = {"num_trainers": 2, "num_workers": 2}
    return tiny_config(ensemble=two, model=model, checkpoint={"every_rounds": 1})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two rounds, whose two trainers have not merged."""
    config = tiny()
    config.num_rounds, config.eval.sample_tokens, config.seed = 2, 5, 2
    config.outer.average = 0.5
    return train(config, tmp_path_factory.mktemp("trained") / "r")


def trainer_of(params_M, position):
    return jax.tree.map(lambda x: x[position], params_M)


# --- Export from a run ------------------------------------------------------------------------


def test_a_run_leaves_its_consensus_for_hugging_face(trained):
    export = trained.workdir / "export"
    assert_equal(hf.load(export).params, trained.params)
    assert load_tokenizer(str(export)).eot_id == 256
    config = json.loads((export / "config.json").read_text())
    ids = [config[key] for key in ("vocab_size", "eos_token_id", "bos_token_id")]
    assert ids == [257, 256, None]


def test_each_evaluation_continues_the_same_heldout_text_with_the_consensus(trained):
    lines = [e for e in read(trained.workdir / "ledger.jsonl") if e["event"] == "eval"]
    samples = [e["sample"] for e in lines if e["trainer"] == "consensus"]
    assert len(samples) == 2 and samples[0][0] == samples[1][0]
    assert not any("sample" in e for e in lines if e["trainer"] != "consensus")
    first, *_, consensus = (e for e in lines if e["round"] == 2)
    assert consensus["source"] != "only" and consensus["loss"] < first["loss"]
    network = hf.load(trained.workdir / "export").network
    tokenizer, (start, text) = load_tokenizer(str(trained.workdir / "export")), samples[-1]
    (ids,) = tokenizer.encode_batch([start.encode().decode("unicode_escape")])
    logits_of = jax.jit(lambda tokens_BL: network.apply({"params": trained.params}, tokens_BL))
    for _ in range(5):  # samples from softmax(logits / 0.8) by the Gumbel trick
        tokens_L = np.pad(np.int32(ids), (0, network.max_length - len(ids)))
        logits_V = logits_of(tokens_L[None])[0, len(ids) - 1]
        noise_V = jax.random.gumbel(jax.random.fold_in(jax.random.key(0), len(ids)), (1, 257))[0]
        ids = [*ids, int((logits_V + 0.8 * noise_V).argmax())]
    assert text == readable(np.array(ids[-5:]), tokenizer, max_chars=99)
    assert "How the consensus continues" in (trained.workdir / "report/index.html").read_text()


def test_any_trainer_of_any_checkpoint_is_read_and_the_consensus_is_the_runs_own(trained):
    one = read_trained(trained.workdir, this_machine(), trainer=1)
    assert (one.round, one.source) == (2, "trainer 1")
    assert_equal(one.params, trainer_of(trained.ensemble.average_M, 1))
    again = read_trained(trained.workdir, this_machine())
    (last,) = [
        e["source"]
        for e in read(trained.workdir / "ledger.jsonl")
        if e["event"] == "eval" and e["round"] == 2 and e["trainer"] == "consensus"
    ]
    assert again.source == last
    assert_equal(again.params, trained.params)


def test_what_is_not_there_or_damaged_is_named(trained, tmp_path):
    with pytest.raises(ConfigError, match="round 7, have 1, 2"):
        read_trained(trained.workdir, this_machine(), round=7)
    with pytest.raises(ConfigError, match="no trainer 5, have 0, 1"):
        read_trained(trained.workdir, this_machine(), trainer=5)
    with pytest.raises(CheckpointError, match="name the folder of a run"):
        read_trained(tmp_path, this_machine())
    copy = shutil.copytree(trained.workdir, tmp_path / "copy")
    file = copy / "checkpoints" / "1" / "host.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(CheckpointError, match="host.json.*choose another round"):
        read_trained(copy, this_machine(), round=1)
    file.write_text(file.read_text()[:-1])
    before = read_trained(copy, this_machine(), round=1, trainer=1)
    assert before.round == 1
    after_M = trained.ensemble.params_M
    assert np.any(before.params["head"]["kernel"] != trainer_of(after_M, 1)["head"]["kernel"])


def test_commands_export_and_write(trained, tmp_path, capsys):
    def run(command, folder, **options):
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return cli.main([command, str(folder), *words]), *capsys.readouterr()

    out, workdir = tmp_path / "out", trained.workdir
    done = run("export", workdir, out=out, trainer=1)
    assert done == (0, f"{out}: round 2, trainer 1, float32\n", "")
    assert_equal(hf.load(out).params, trainer_of(trained.ensemble.average_M, 1))
    code, _, fault = run("export", workdir, out=out)
    assert code == 2 and "exists already" in fault
    # A request for more tokens than the model can read gives as many as it can.
    code, text, faults = run("generate", out, prompt="def", tokens=99, samples=2)
    assert code == 0 and text.count("-\ndef") == 2 and faults == ""
    for folder, options, fault in [
        (out, dict(prompt="x" * 32), "--prompt: 32 tokens, the model reads 32"),
        (tmp_path / "no", {}, "no such folder"),
    ]:
        code, _, lines = run("generate", folder, **options)
        assert code in (2, 3) and fault in lines and lines.count("\n") == 1


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base model: 256 ends a text, but turns end by 258; and its byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    load_tokenizer("bytes").save(folder, None)
    fast = AutoTokenizer.from_pretrained(folder)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    network = build_network(validate(tiny(vocab_size=259)).model)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), param_shapes(network))
    hf.save(params, folder / "model", load_tokenizer(str(folder)), network=network)
    return folder / "model"


@pytest.mark.parametrize(
    ("words", "config", "generation", "written"),
    [
        (["--prompt=q"], {}, None, "qab<|im_end|>cd"),
        (["--prompt=q"], {"eos_token_id": [256, ord("b")]}, None, "qa"),
        (["--prompt=q"], {"eos_token_id": ord("b")}, {"eos_token_id": [ord("c"), 258]}, "qab"),
        (["--prompt=q"], {}, {"eos_token_id": None}, "qab<|im_end|>cd"),
        (["--prompt=q"], {"eos_token_id": [2**63, 2**31, -1, ord("b")]}, None, "qa"),
        (["--chat=q"], {}, None, "ab"),
    ],
)
def test_each_end_that_transformers_knows_or_the_template_writes_ends_an_answer(
    base, tmp_path, monkeypatch, capsys, words, config, generation, written
):
    folder = shutil.copytree(base, tmp_path / "model")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    one = [] if words == ["--chat=q"] else ["--samples=1"]
    rest = [ord("a"), ord("b"), 258, ord("c"), ord("d"), 256, ord("e")]
    monkeypatch.setattr(llama, "generate", lambda *given, **_: [[*given[2][0], *rest]])
    assert cli.main(["generate", str(folder), *words, *one]) == 0
    assert capsys.readouterr().out == f"{written}\n"


def test_ends_that_are_no_ids_are_refused(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": ["<|im_end|>"]}')
    with pytest.raises(DataError, match=r"eos_token_id.*im_end.*, expected a valid integer"):
        load_tokenizer(str(folder))


CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize(
    ("end", "row", "line", "ends"),
    [
        ("<|im_end|>", CHAT, "; answers end by <|im_end|>, where the model does not", (256, 258)),
        ("<|endoftext|>", CHAT, "", (256,)),
        ("!", CHAT, "; the model will not learn to stop, because the template", (256,)),
        ("<|im_end|>", {"prompt": "q", "completion": "a"}, "", (256, 258)),
        ("<|im_end|>", {"text": "q and a text"}, "", (256,)),
    ],
)
def test_what_ends_rendered_answers_is_compared_with_the_ends_and_named_by_the_export(
    base, tmp_path, end, row, line, ends
):
    data = dict(source="jsonl", path=str(tmp_path / "rows.jsonl"), text_column="+".join(row))
    if end not in CHATML:
        data["template"] = str(tmp_path / "template")
        (tmp_path / "template").write_text(CHATML.replace("<|im_end|>", end))
    rows = (json.dumps(row).replace('"q', f'"q{n}') + "\n" for n in range(40))
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    settings = data_settings(vocab_size=259, **data, sequence_length=24, heldout_frac=0.2)
    model = {"init_from": str(base), "checkpoint": (base / "config.json").read_text()}
    model = validate(tiny(vocab_size=259)).model.model_copy(update=model)
    settings = settings.model_copy(update={"model": model})
    corpus = load_corpus(settings, note=lambda line: None)
    (said,) = re.findall(r"tokenizer: .*, 259 ids(.*)\n", corpus.describe())
    assert said.startswith(line) and bool(said) == bool(line)
    write_consensus(hf.load(base).params, tmp_path / "export", settings, corpus.tokenizer)
    assert hf.load(tmp_path / "export").ends == ends
    assert load_tokenizer(str(tmp_path / "export")).ends == ends


# --- Starting from a checkpoint ---------------------------------------------------------------


def test_all_trainers_start_from_the_checkpoint_and_the_share_of_the_peak_is_said(
    trained, tmp_path, monkeypatch, capsys
):
    h100 = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    machine = types.SimpleNamespace(devices=[h100])
    most = attempts.most_tokens_per_s
    slower = 1e6 / 989e12  # a million operations per second
    monkeypatch.setattr(
        attempts,
        "most_tokens_per_s",
        lambda spec: slower * most(dataclasses.replace(spec, machine=machine)),
    )
    far = jax.tree.map(lambda x: 10 * np.asarray(x), trained.params)
    hf.save(far, tmp_path / "far", network=hf.load(trained.workdir / "export").network)
    config = tiny(init_from=str(tmp_path / "far"))
    found = dict(completed(validate(config)).model)
    config.model.update({name: found[name] for name in SIZES})
    config.data.tokenizer = "bytes"
    params_M = train(config, tmp_path / "r").ensemble.params_M
    printed = re.search(r"(\d[\d,]*) tok/s \(([\d,]+)% of the peak\)", capsys.readouterr().out)
    tokens_per_s, percent = (int(number.replace(",", "")) for number in printed.groups())
    operations = 6 * sum(np.size(x) for x in jax.tree.leaves({**far, "embed": ()}))
    percent_per_token = 100 * operations / 1e6  # of the peak, for each token per second
    # Both numbers are printed as whole ones, so each is at most a half away from what it was.
    most_off = 0.5 + 0.5 * percent_per_token
    assert percent == pytest.approx(percent_per_token * tokens_per_s, rel=1e-9, abs=most_off)
    for position in (0, 1):  # the weights move by two steps of at most 0.01 and an outer update
        assert_close(trainer_of(params_M, position), far, rtol=0, atol=0.1)


def test_a_run_keeps_what_its_checkpoint_describes_and_resumes_without_it(tmp_path):
    far = {"init_from": str(tmp_path / "far")}
    config = tiny_config(model=far, checkpoint={"every_rounds": 1})
    network = build_network(validate(tiny()).model).clone(qk_norm=True, tied=True)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.1, np.float32), param_shapes(network))
    head_dim = network.width // network.num_heads
    qwen3 = config_of(network, "qwen3", head_dim=head_dim, tie_word_embeddings=True)
    hf.save(params, tmp_path / "far", load_tokenizer("bytes"), network=network, config=qwen3)
    described = json.loads((tmp_path / "far" / "config.json").read_text())
    more = {"generation": [1, {"a": 2}], "bos_token_id": 3, "eos_token_id": [4, 256]}
    (tmp_path / "far" / "config.json").write_text(json.dumps(described | more))
    config.model.update(dict.fromkeys(SIZES))
    train(config, tmp_path / "r")
    shutil.rmtree(tmp_path / "far")
    config.num_rounds = 2
    result = train(config, tmp_path / "r")
    found = hf.load(tmp_path / "r" / "export")
    assert found.network == network and found.config == described | more
    assert_equal(found.params, result.params)
    assert cli.main(["export", str(tmp_path / "r"), "--out", str(tmp_path / "again")]) == 0
    assert hf.load(tmp_path / "again").config == described | more
    recorded = read_trained(tmp_path / "r", this_machine()).settings.model.checkpoint
    assert json.loads(recorded) == described | more
    with pytest.raises(DataError, match="no such folder"):
        train(config, tmp_path / "another")


def test_sizes_that_are_unset_are_the_checkpoints(trained):
    config = tiny(init_from=str(trained.workdir / "export"))
    for name in SIZES:
        config.model[name] = None
    found = completed(validate(config)).model
    config.model.init_from = ""
    alone = completed(validate(config)).model
    network = hf.load(trained.workdir / "export").network
    for name in SIZES:
        size = OPTIONS[f"model.{name}"].default
        assert getattr(found, name) == getattr(network, name, size)
        assert getattr(alone, name) == size
    assert found.width != alone.width


def test_another_size_is_refused_before_anything_is_made_but_not_a_longer_context(
    trained, tmp_path
):
    config = tiny(init_from=str(trained.workdir / "export"), width=32, norm_eps=1e-6)
    with pytest.raises(ConfigError) as caught:
        train(config, tmp_path / "r")
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["model.width = 32", "model.norm_eps = 1e-06"]
    assert "has 16; unset it: model.width=none" in lines[0]
    with pytest.raises(DataError, match="no such folder"):
        train(tiny(init_from="./nowhere"), tmp_path / "r")
    assert list(tmp_path.iterdir()) == []
    config = tiny(init_from=str(trained.workdir / "export"), max_length=64)
    model, _ = with_its_weights(validate(config))
    assert_equal(model.params, trained.params)
