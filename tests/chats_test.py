"""Chats: ids as the template gives them, what counts, how they are packed, and their loss."""

import dataclasses
import datetime
import io
import itertools
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import toy
from texts import save_byte_tokenizer, write_documents
from toy import data_settings
from transformers import AutoTokenizer

from adloco_jax import main as cli
from adloco_jax.config import completed, validate
from adloco_jax.data import load_corpus, load_tokenizer, rows, sources
from adloco_jax.data.chats import num_bytes, read, tokens_in_spans
from adloco_jax.data.corpus import column_of_texts
from adloco_jax.data.sampling import split_heldout
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.models.configured import build_model
from adloco_jax.run.kept.folder import write_config
from adloco_jax.training import train

pytestmark = pytest.mark.usefixtures("one_device")

IM = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3's: a thought stays in the last turn alone.
THINKING = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a tokenizer of bytes with a template, whose turns end with the end of text."""
    names = {"eos_token": IM[1], "additional_special_tokens": [IM[0]], "chat_template": CHATML}
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), **names)


def turns(*contents, system=""):
    """A chat: a question, its answer, the next question, ..."""
    roles = ("user", "assistant") * len(contents)
    chat = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": system}] * bool(system) + chat


def chats_of(count, seed=0):
    rng = random.Random(seed)
    return [
        turns(
            *(f"{n}.{k} " + "é" * rng.randint(1, 25) for k in range(2 * rng.randint(1, 3))),
            system="Be brief." * (n % 3 == 0),
        )
        for n in range(count)
    ]


def settings_of(path, tokenizer, **changes):
    given = dict(source="jsonl", path=str(path), text_column="messages", heldout_frac=0.2)
    given |= dict(tokenizer=str(tokenizer), sequence_length=400)
    return data_settings(vocab_size=258, **given | changes)


def load(path, tokenizer, **changes):
    return load_corpus(settings_of(path, tokenizer, **changes), note=lambda line: None)


def chats_in(corpus):
    """Of each chat in the rows of a corpus: its ids, and its ids that count."""
    found = []
    for side in (corpus.rows, corpus.heldout_rows):
        read = side[np.arange(len(side))]
        for row, begin, weight in zip(read.tokens, read.starts, read.weights, strict=True):
            for start in np.unique(begin):
                chat = begin == start
                if weight[chat].any():  # else it is padding
                    found.append((row[chat].tolist(), row[chat & (weight != 0)].tolist()))
                else:
                    assert set(row[chat]) == {corpus.tokenizer.eot_id}
    return sorted(found)


def expected(tokenizer, chats, first=0):
    """What `apply_chat_template` gives, and the answers with their end, written by hand."""
    fast = AutoTokenizer.from_pretrained(tokenizer)
    found = []
    for chat in chats:
        ids = fast.apply_chat_template(chat, return_dict=False)
        answers = [t["content"] for t in chat[first:] if t["role"] == "assistant"]
        text = "".join(f"{answer}{IM[1]}" for answer in answers)
        found.append((ids, fast.encode(text, add_special_tokens=False)))
    return sorted(found)


def write_table(folder, records):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "chats.parquet")
    return folder / "chats.parquet"


WRITERS = {"jsonl": write_documents, "parquet": write_table, "hf": write_table}


def test_ids_are_those_of_the_template_and_answers_with_their_end_count(tmp_path, tokenizer):
    chats = chats_of(40)
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats])
    corpus = load(path, tokenizer)
    assert chats_in(corpus) == expected(tokenizer, chats)
    counts = [sum(len(a) for _, a in chats_in(corpus)), corpus.rows.num_answer_tokens]
    counts.append(corpus.heldout_rows.num_answer_tokens)
    assert counts[0] == sum(counts[1:])
    assert f"; {counts[1]:,} and {counts[2]:,} tokens of answers count;" in corpus.describe()
    assert "data: 1 file; 32 chats to train on, 8 held out" in corpus.describe()
    corpus = load(path, tokenizer, loss="all")
    assert chats_in(corpus) == [(ids, ids[1:]) for ids, _ in expected(tokenizer, chats)]
    assert " tokens count;" in corpus.describe()


def test_a_prompt_and_its_completion_are_turns_or_text(tmp_path, tokenizer):
    both = {"text_column": "prompt+completion"}
    chats = [chat for chat in chats_of(40) if len(chat) > 3]
    records = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]
    corpus = load(write_documents(tmp_path, records), tokenizer, **both)
    assert chats_in(corpus) == expected(tokenizer, chats, first=-1)
    texts = [{"prompt": f"{n}? ", "completion": f"Twice is {2 * n}."} for n in range(40)]
    path = write_documents(tmp_path, texts, "texts.jsonl")
    corpus = load(path, "bytes", sequence_length=60, **both)
    found = [(bytes(ids[:-1]).decode(), bytes(a[:-1]).decode()) for ids, a in chats_in(corpus)]
    assert found == sorted((t["prompt"] + t["completion"], t["completion"]) for t in texts)
    assert all(ids[-1] == answer[-1] == 256 for ids, answer in chats_in(corpus))


def test_of_more_chats_than_asked_for_fewer_are_read(tmp_path, tokenizer):
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats_of(60)])
    corpus = load(path, tokenizer, num_sequences=3)
    weights_EL = corpus.rows[np.arange(3)].weights
    assert weights_EL.shape == (3, 401) and np.isclose(weights_EL.sum(axis=1).mean(), 1)
    count = np.count_nonzero(weights_EL)
    assert f"; {count:,} and " in corpus.describe()
    chats = len(chats_in(corpus)) - 12
    assert f"data: 1 file; {chats} chats to train on, 12 held out" in corpus.describe()


def test_if_a_later_turn_changes_earlier_ones_only_the_last_answer_counts(tmp_path, tokenizer):
    thought = [
        turns(f"{n}?", "<think>Hm</think>one", "and?", f"<think>{n}</think>two") for n in range(9)
    ]
    again = "<think>9</think>one"
    chats = [*thought, turns("9?", again, "9?", again), *chats_of(9)]
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats])
    (tmp_path / "thinking.jinja").write_text(THINKING)
    corpus = load(path, tokenizer, template=str(tmp_path / "thinking.jinja"), heldout_frac=0.5)
    decode = corpus.tokenizer.decode
    found = {decode(ids): decode(answers) for ids, answers in chats_in(corpus)}
    for n in range(9):
        (ids,) = (text for text in found if f"<think>{n}</think>" in text)
        assert ids.count("one") == 1 and "Hm" not in ids
        assert found[ids] == f"<think>{n}</think>two{IM[1]}"
    assert sum(answers == f"{again}{IM[1]}" for answers in found.values()) == 1
    assert "; 10 chats count by the last answer only: the template cuts others" in corpus.describe()
    assert len(found) == 19
    other = THINKING.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    (tmp_path / "other.jinja").write_text(other)
    with pytest.raises(DataError, match=r"docs.jsonl:\d+: the chat template starts an answer"):
        load(path, tokenizer, template=str(tmp_path / "other.jinja"))


USER, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
FAULTS = {
    "no turns": ([], "'messages': have [], need a list of turns"),
    "weight": ([USER, ANSWER | {"weight": 0.5}], "'weight': 0.5}, need a weight of 0 or 1"),
    "calls": ([USER, ANSWER | {"tool_calls": ["f"]}], "'tool_calls': have ['f'], need"),
    "only calls": (
        [USER, ANSWER | {"content": None, "tool_calls": [{"name": "f"}]}],
        ", need content, or a data.template that writes 'tool_calls'",
    ),
    "a picture": (
        [{"role": "user", "content": [{"type": "image"}]}],
        "[{'type': 'image'}]}, need a 'content' that is text",
    ),
    "no answer's content": ([USER, {"role": "assistant"}], "turn 2: have {'role': 'assistant'}"),
    "a list as role": (
        [{"role": [1], "content": "?"}],
        "turn 1: have {'role': [1], 'content': '?'}, need a role",
    ),
    "only an end": (
        [USER, ANSWER | {"content": f"{IM[1]}\n"}],
        ", need an answer that is not empty",
    ),
    "half a character": (
        [USER, ANSWER | {"content": "\ud83d"}],
        "'messages': have '\\ud83d' at character",
    ),
    "text of Python": (str([USER, ANSWER]), "need turns as JSON (json.dumps writes it"),
    "refused by the template": ([USER, ANSWER, ANSWER], "template refuses it (must alternate)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_with_the_row(tmp_path, tokenizer, name):
    messages, message = FAULTS[name]
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages | length > 2 %}{{ raise_exception('must alternate') }}{% endif %}" + CHATML
    )
    path = write_documents(tmp_path, [{"messages": [USER, ANSWER]}, {"messages": messages}])
    with pytest.raises(DataError) as error:
        load(path, tokenizer, template=str(template))
    text = str(error.value)
    assert text.startswith(f"{path}:2: ") and message in text and "\n" not in text


def test_what_is_missing_is_one_line(tmp_path, tokenizer):
    path = write_documents(tmp_path, [{"messages": [USER, ANSWER]}] * 9)
    with pytest.raises(ConfigError, match=r"docs.jsonl:1: the tokenizer has no chat template; set"):
        load(path, "bytes")
    with pytest.raises(DataError, match="set data.text_column=messages$"):
        load(path, tokenizer, text_column="text")
    with pytest.raises(DataError, match="^data.template=nowhere: unreadable"):
        load(path, tokenizer, template="nowhere")
    halves = write_documents(tmp_path, [{"prompt": "?", "completion": None}] * 9)
    with pytest.raises(
        DataError, match="docs.jsonl:1: 'prompt.completion': have .*None., need text or"
    ):
        load(halves, tokenizer, text_column="prompt+completion")
    questions = write_documents(tmp_path, [{"messages": [USER]}] * 9)
    with pytest.raises(
        DataError, match=r"too little text: have 0 rows .* and 9 chats without an answer"
    ):
        load(questions, tokenizer)


def test_long_chats_are_cut_at_their_end_and_those_without_an_answer_are_left_out(
    tmp_path, tokenizer
):
    fits, long = turns("?", "yes"), turns("?", "word " * 200)
    asked, no_answer = turns("? " * 300, "lost"), turns("?")
    chats = [*chats_of(20), fits, long, asked, no_answer]
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats])
    corpus = load(path, tokenizer)
    whole = expected(tokenizer, chats[:21])
    cut = [found for found in chats_in(corpus) if found not in whole]
    assert len(chats_in(corpus)) == 22 and len(cut) == 1
    ((ids, answer),) = cut
    assert ids == expected(tokenizer, [long])[0][0][:401]
    assert corpus.tokenizer.decode(answer) == ("word " * 200)[: len(answer)]
    assert ", 1 of the chats cut; " in corpus.describe()
    assert "; 2 chats without an answer within data.sequence_length left out; " in corpus.describe()


def test_best_fit_leaves_no_document_apart_and_little_space():
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    lengths[:3] = 64, 63, 1
    row_D, offset_D = rows.pack(lengths, 64)
    assert row_D[:3].tolist() == [0, 1, 1]
    space = np.zeros((row_D.max() + 1, 64), int)
    for row, offset, length in zip(row_D, offset_D, lengths, strict=True):
        space[row, offset : offset + length] += 1
    assert space.max() == 1 and space.mean() > 0.95
    assert (np.diff(np.unique(row_D)) == 1).all()


# -- The loss --------------------------------------------------------------------------------


def test_a_run_reports_the_loss_of_answers_and_its_model_answers(
    tmp_path, tokenizer, capsys, monkeypatch
):
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats_of(120)])
    given = dict(source="jsonl", path=str(path), text_column="messages", tokenizer=str(tokenizer))
    config = toy.tiny_config(data=given | {"sequence_length": 96, "heldout_frac": 0.2})
    config.model.vocab_size, config.model.max_length, config.eval.sample_tokens = 258, 128, 4
    result = train(config, tmp_path / "run")
    assert "attention by xla within documents" in capsys.readouterr().out
    settings = validate(config)
    corpus = load_corpus(settings)
    loss_fn = build_model(settings.model)[1]
    losses = jax.jit(jax.vmap(lambda row: loss_fn(result.params, row)))
    lines = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    assert lines[0]["loss_unit"] == "nats/token"
    sample = next(line["sample"] for line in reversed(lines) if "sample" in line)
    assert sample[0].endswith(f"{IM[0]}assistant\\n") and sample[0].count("assistant") == 1
    report = split_heldout(
        corpus.heldout_rows, num_sequences=settings.eval.num_sequences, batch_size=1
    ).report_rows
    counts = (report.weights != 0).sum(axis=1)
    assert len(set(counts)) > 1
    examples = jax.tree.map(lambda leaf_EL: jnp.asarray(leaf_EL)[:, None], report)
    unit = len(corpus.heldout_rows) / corpus.heldout_rows.num_answer_tokens
    expected_loss = float(np.sum(losses(examples)) / unit / counts.sum())
    assert abs(result.loss - expected_loss) < 1e-5 * expected_loss
    monkeypatch.setattr("sys.stdin", io.StringIO("3?\n"))
    capsys.readouterr()
    assert cli.main(["generate", str(tmp_path / "run"), "--tokens=5", "--chat"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("> ") and out.endswith("\n> ")


# -- Chats as people have them ---------------------------------------------------------------

WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city."}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "Rain."}]
CALLED.append(ANSWER)
WRITTEN = (
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>"
)
MARKED = f"{{% generation %}}{WRITTEN}{{% endgeneration %}}"
# Writes tools and calls, as Qwen2.5's; or also marks what the model writes, as TRL's for training.
TEMPLATES = {
    name: "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    + answer
    + "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for name, answer in (("plain", WRITTEN), ("marked", MARKED))
}


def shaped(role, content):
    return {"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": content}


SHAREGPT = [shaped(**turn) for turn in turns("?", "!", system="Be brief.")]
PART = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
FUNCTION = {"name": "weather", "description": "Of a city."}
FAKE = f"{IM[0]}assistant\n7!{IM[1]}\n"  # of a question
LONG = turns(*(f"{n // 2}!" if n % 2 else FAKE * (n % 3) + "?" for n in range(40)))
LONG_TOOLS = [*turns("?", "!") * 4, *CALLED * 4]
ROWS = {  # a row, the chat that it stands for, and which turns count
    "sharegpt beside a text": (
        {"text": "TEXT", "conversations": SHAREGPT},
        *(turns("?", "!", system="Be brief."), [2]),
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "text": "all of it"},
        *(turns("Add.\n1 2", "3"), [1]),
    ),
    "alpaca without input": (
        {"instruction": "Add.", "input": "", "output": "3", "system": "Be brief."},
        *(turns("Add.", "3", system="Be brief."), [2]),
    ),
    "llama-factory": (
        {
            "conversations": [
                shaped("human", "?"),
                shaped("function_call", json.dumps(CALL["function"])),
                shaped("observation", "Rain."),
                shaped("gpt", "!"),
            ],
            "tools": json.dumps([FUNCTION]),
            "system": "Be brief.",
        },
        *([{"role": "system", "content": "Be brief."}, *CALLED], [2, 4]),
    ),
    "a line of turns": ([USER, ANSWER], [USER, ANSWER], [1]),
    "long": ({"messages": LONG}, LONG, [*range(1, 40, 2)]),
    "long with tools": (
        {"messages": LONG_TOOLS, "tools": [WEATHER]},
        *(LONG_TOOLS, [i for i, t in enumerate(LONG_TOOLS) if t["role"] == "assistant"]),
    ),
    "sharegpt": ({"conversations": SHAREGPT}, turns("?", "!", system="Be brief."), [2]),
    "parts": ({"messages": [PART, ANSWER]}, turns("ab", "!"), [1]),
    "json of turns": ({"messages": [*map(json.dumps, turns("?", "!"))]}, turns("?", "!"), [1]),
    "json of both": (
        {"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])},
        *([USER, ANSWER], [1]),
    ),
    "weight": (
        {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}, USER, ANSWER]},
        *([USER, ANSWER] * 3, [3, 5]),
    ),
    "an answer of the prompt again": (
        {"prompt": [USER, ANSWER], "completion": [USER, ANSWER] * 2},
        *([USER, ANSWER] * 3, [3, 5]),
    ),
    "assistant first": ({"messages": [ANSWER, USER, ANSWER]}, [ANSWER, USER, ANSWER], [0, 2]),
    "an end of its own": (
        {"messages": [USER, {"role": "assistant", "content": f"!{IM[1]}\n{IM[1]}"}]},
        *([USER, ANSWER], [1]),
    ),
    "markup of a question": (
        {"messages": turns(f"{IM[0]}assistant\n!{IM[1]}\n", "!", "?", "!")},
        *(turns(f"{IM[0]}assistant\n!{IM[1]}\n", "!", "?", "!"), [1, 3]),
    ),
    "tools": (
        {"messages": [*CALLED, USER, ANSWER], "tools": [WEATHER]},
        *([*CALLED, USER, ANSWER], [1, 3, 5]),
    ),
    "json of tools": (
        {
            "messages": [
                *CALLED[:1],
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": json.dumps(
                        [CALL | {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
                    ),
                },
                *CALLED[2:],
            ],
            "tools": json.dumps([WEATHER]),
        },
        *(CALLED, [1, 3]),
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ROWS)
def test_chats_as_people_have_them_are_those_of_transformers(tmp_path, tokenizer, name, template):
    row, chat, at = ROWS[name]
    (tmp_path / "t.jinja").write_text(TEMPLATES[template])
    path = write_documents(tmp_path, [row] * 2)
    given = {"text_column": "text", "sequence_length": 2_000}
    data = settings_of(path, tokenizer, template=str(tmp_path / "t.jinja"), **given).data
    data = data.model_copy(update={"text_column": column_of_texts(data), "label_column": ""})
    loaded = load_tokenizer(str(tokenizer), template=data.template)
    found = sources.jsonl_documents(path, data)
    for document in sources.documents_of(found, data, where="", num_classes=None, tokenizer=loaded):
        fast = AutoTokenizer.from_pretrained(tokenizer)
        wanted = fast.apply_chat_template(
            chat,
            tools=[WEATHER] if "tools" in row else None,
            chat_template=TEMPLATES["marked"],
            return_assistant_tokens_mask=True,
        )
        ids, offsets = loaded.encode_aligned(document.text)
        assert ids.tolist() == wanted["input_ids"]
        mask = np.array(wanted["assistant_masks"])
        number = np.cumsum(np.diff(mask, prepend=0) == 1) - 1  # of the answer
        answers = [i for i, turn in enumerate(chat) if turn["role"] == "assistant"]
        mask &= np.isin(number, [answers.index(i) for i in at])
        assert tokens_in_spans(offsets, document.answers.spans).tolist() == mask.tolist()
        contents = document.answers.contents
        wanted_bytes = np.count_nonzero(ids[mask > 0] < 256)
        assert num_bytes(document.text, contents, len(document.text)) == wanted_bytes
        assert document.answers.unread == ({"text"} if "text" in row else set())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": "[{"}', "'messages': have '[{', need a list of turns"),
        ('{"messages": [', "not one JSON object per line"),
        ('[{"messages": []}]', "have a JSON list, need one object per line"),
    ],
)
def test_a_bad_row_is_named_or_passes_and_is_counted(tmp_path, tokenizer, line, message):
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats_of(30)])
    rest = path.read_text()
    path.write_text(f"{line}\n{rest}{line}\n")
    with pytest.raises(DataError) as error:
        load(path, tokenizer)
    assert str(error.value).startswith(f"{path}:1: ") and message in str(error.value)
    with pytest.raises(DataError) as error:
        load(path, tokenizer, skip_bad=1)
    assert str(error.value).startswith(f"{path}:32: ") and message in str(error.value)
    assert str(error.value).endswith("; row 2 that is bad, and data.skip_bad=1")
    corpus = load(path, tokenizer, skip_bad=2)
    assert "; 2 bad rows left out" in corpus.describe() and len(chats_in(corpus)) == 30


def test_what_says_not_to_learn_acts_and_what_nothing_reads_is_named(tmp_path, tokenizer):
    labels = [(1, 0.0), (True, False), ("1", "0")]
    for (name, source), (yes, no) in zip(WRITERS.items(), labels, strict=True):
        good, bad = {"completion": "yes", "label": yes}, {"completion": "BAD", "label": no}
        rows_of = [{**row, "prompt": f"{n}. "} for n in range(30) for row in (good, bad)]
        path = source(tmp_path, [{**row, "id": "a"} for row in rows_of])
        given = {"text_column": "prompt+completion", "sequence_length": 60, "heldout_frac": 0.5}
        corpus = load(path, tokenizer, source=name, **given)
        found = {corpus.tokenizer.decode(ids) for ids, _ in chats_in(corpus)}
        assert found == {f"{n}. yes{IM[1]}" for n in range(30)}
        assert "; 30 chats with a false label left out" in corpus.describe()
        assert ", 15 held out" in corpus.describe()  # half of those that count
        assert "\nnot read: id\n" in corpus.describe()
        named = [USER | {"name": "me"}, *CALLED[1:2], ANSWER]
        named[1] = named[1] | {"content": "Calls."}
        chat = {"tools": [WEATHER], "n": 1}
        path = source(
            tmp_path, [chat | {"messages": turns(str(n), "!") + named} for n in range(40)]
        )
        corpus = load(path, tokenizer, source=name)
        unread = "\nnot read: n, name of turns, tool_calls of turns, tools\n"
        assert unread in corpus.describe()


def test_a_template_writes_the_date_of_the_first_preparation_also_later(
    tmp_path, tokenizer, monkeypatch
):
    class Today(datetime.date):
        day_number = 20_000

        @classmethod
        def today(cls):
            return cls(1970, 1, 1) + datetime.timedelta(cls.day_number)

    monkeypatch.setattr(datetime, "date", Today)
    (tmp_path / "t.jinja").write_text("{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats_of(60)])
    template = str(tmp_path / "t.jinja")
    settings = settings_of(path, tokenizer, template=template, num_streams=4)
    first = completed(settings, tmp_path / "run")
    made = load_corpus(first, note=print)
    assert "04 Oct 2024" in made.describe()
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run", first)
    Today.day_number += 1
    again = load_corpus(completed(settings, tmp_path / "run"), note=print)
    assert again.fingerprint == made.fingerprint
    other = load_corpus(completed(settings, tmp_path / "other"), note=print)
    assert other.fingerprint != made.fingerprint and "05 Oct 2024" in other.describe()


def test_a_text_that_ends_by_the_end_of_text_gets_no_second_one(tmp_path, tokenizer):
    texts = [{"prompt": f"{n}? ", "completion": f"yes {n}{IM[1]}"} for n in range(60)]
    for text in texts[::2]:
        text["completion"] += f"\n{IM[1]}\n"
    path = write_documents(tmp_path, texts)
    corpus = load(path, tokenizer, text_column="prompt+completion", sequence_length=40)
    found = {tuple(map(corpus.tokenizer.decode, chat)) for chat in chats_in(corpus)}
    assert found == {(f"{n}? yes {n}{IM[1]}", f"yes {n}{IM[1]}") for n in range(60)}
    corpus = load(path, tokenizer, text_column="completion", sequence_length=40)
    packed = corpus.tokenizer.decode(np.asarray(corpus.rows).reshape(-1))
    assert packed.startswith(f"yes 0{IM[1]}yes 1{IM[1]}") and 2 * IM[1] not in packed


# -- Ends of answers, long chats, and rows that are no chats -----------------------------------

ENDS = {  # a template's turns; the texts that count, and the word of the header
    "marks without the end": (
        "{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n",
        f"!{IM[1]}",
        "258 ids\n",
    ),
    "the next role's": (
        "{% if m.role == 'user' %}<|im_start|>{% endif %}{{ m.content }}"
        "{% if m.role == 'user' %}A: {% endif %}",
        f"!{IM[0]}",
        "answers end by <|im_start|>, where the model does not stop yet: the export's",
    ),
    "none": (
        "{{ m.role }}: {{ m.content }}\n",
        "!\n",
        "; the model will not learn to stop, because the template writes no special token behind"
        " answers; set data.template to a file that writes <|im_end|> there",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_an_answer_counts_whoever_writes_it_or_is_said_to_be_missing(
    tmp_path, tokenizer, name
):
    turn, counts, line = ENDS[name]
    template = tmp_path / "t.jinja"
    template.write_text(
        f"{{% for m in messages %}}{turn}{{% endfor %}}"
        + "{% if add_generation_prompt %}assistant: {% endif %}" * ("m.role }}" in turn)
    )
    chats = [{"messages": turns(str(n), "!", "?", "!")} for n in range(60)]
    path = write_documents(tmp_path, chats)
    corpus = load(path, tokenizer, template=str(template), sequence_length=99)
    found = [corpus.tokenizer.decode(answers) for _, answers in chats_in(corpus)]
    assert found == [2 * counts] * 60
    assert line in corpus.describe()


@pytest.mark.parametrize(("length", "most"), [(10_000, 20), (60, 4)])
def test_a_long_chat_is_rendered_in_linear_time_and_no_further_than_its_row(
    tokenizer, length, most
):
    loaded = load_tokenizer(str(tokenizer))
    sizes = []

    def render(turns, **rest):
        sizes.append(len(turns))
        return loaded.render(turns, **rest)

    chat = turns(*(f"{n}" for n in range(400)))
    counting = dataclasses.replace(loaded, render=render)
    data = settings_of("", tokenizer, sequence_length=length).data
    text, answers = read({"messages": chat}, "row", data, counting)
    assert sum(sizes) < most * len(chat)
    if length == 10_000:
        expected_text = "".join(f"{n}{IM[1]}" for n in range(1, 400, 2))
        assert "".join(text[start:end] for start, end in answers.spans) == expected_text


def test_bits_per_byte_are_of_the_part_of_an_answer_that_the_row_holds(tmp_path, tokenizer):
    chats = [turns(f"{n}?", "x" * 203) for n in range(40)]
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats])
    corpus = load(path, tokenizer, sequence_length=64)
    assert corpus.tokens_per_byte == 1  # the end of the answer is cut off
    corpus = load(path, tokenizer, sequence_length=400)
    assert corpus.tokens_per_byte == pytest.approx(204 / 203)


def test_a_text_names_the_columns_that_are_not_read(tmp_path, tokenizer):
    rows_of = [{"text": f"{n}" * 60, "url": "a", "id": n, "none": None} for n in range(90)]
    for name, source in WRITERS.items():
        path = source(tmp_path, rows_of)
        corpus = load(path, tokenizer, source=name, text_column="text", sequence_length=32)
        assert "\nnot read: id, url\n" in corpus.describe().replace("id, none, url", "id, url")


def test_preferences_are_refused_as_such(tmp_path, tokenizer):
    row = {"prompt": "?", "chosen": "yes", "rejected": "no"}
    path = write_documents(tmp_path, [row] * 9)
    with pytest.raises(DataError, match=r"docs.jsonl:1: preferences .*; rename 'chosen' to"):
        load(path, tokenizer, text_column="text")


def test_too_few_chats_to_hold_out_say_that_they_were_cut(tmp_path, tokenizer):
    chats = [turns(f"{n}?", "x" * 203) for n in range(9)]
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats])
    message = "9 chats are longer than a row and were cut; a chat gives at most one row"
    with pytest.raises(DataError, match=f"have 1 row of 65 tokens to hold out.*{message}"):
        load(path, tokenizer, sequence_length=64, heldout_frac=0.1)


def test_slow_preparation_says_how_far_it_is_and_most_chats_left_out_are_a_warning(
    tmp_path, tokenizer, monkeypatch
):
    chats = [*chats_of(30), *(turns("? " * 300, str(n)) for n in range(70))]
    path = write_documents(tmp_path, [{"messages": chat} for chat in chats])
    clock = itertools.count()
    monkeypatch.setattr("adloco_jax.data.rows.time.monotonic", lambda: float(next(clock)))
    lines = []
    corpus = load_corpus(settings_of(path, tokenizer), note=lines.append)
    words = [line for line in lines if line.startswith("preparing rows: ")]
    assert words[0] == "preparing rows: 5 documents read in 5 s" and len(words) == 5
    warning = "warning: 70 of 100 chats are left out, 70 because data.sequence_length ends before"
    assert f"\n{warning} their answer" in corpus.describe()
