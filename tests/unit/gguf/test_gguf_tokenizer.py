from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shim.gguf import tiny_tokenizer
from shim.gguf.files import GGUFProblem, open_model
from shim.gguf.tokenizer import build, write_tokenizer

TEXTS = [
    "",
    "Hello, world!",
    "It's what we'd call a PANGRAM; THEY'VE known.",
    "  leading,   inner    and trailing spaces   ",
    "tabs\tand\r\nline\n\n\nbreaks \n",
    "numbers 1 12 123 1234 12345678 3.14",
    "人工智能的语言模型。今天天气很好！",  # noqa: RUF001
    "日本語と한국어と中文 mixed with English",
    "🙂🚀 👩\u200d💻 ❤️ 🇫🇷",
    "naïve café Übermäßig ¿qué?",
    "\x00\x7f\u00a0\u3000\ufeff",
    "[gMASK]<sop><|user|>\nhi<|assistant|>\n<think>well</think>ok<|endoftext|>",
    "not special: <|user |> <think > [gMASK",
    "def f(x):\n    return {'a': [1, 2]}  # done\n",
]
SPECIALS = [*tiny_tokenizer.SPECIAL, *tiny_tokenizer.TEXT_LIKE]


@pytest.fixture(scope="module")
def original():
    return tiny_tokenizer.train()


@pytest.fixture(scope="module")
def rebuilt(tiny_model, tmp_path_factory):
    from tokenizers import Tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(tiny_model, directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_equal_to_the_trained_one_and_back_again(original, rebuilt, text):
    ids = rebuilt.encode(text).ids
    assert ids == original.encode(text).ids
    assert rebuilt.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.one_of(st.text(max_size=12), st.sampled_from(SPECIALS)), max_size=6))
def test_any_text_survives(original, rebuilt, pieces):
    text = "".join(pieces)
    ids = rebuilt.encode(text).ids
    assert ids == original.encode(text).ids
    assert rebuilt.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_one_token_each_and_keep_their_numbers(rebuilt, tiny_model):
    tokens = tiny_model.metadata["tokenizer.ggml.tokens"]
    for token in SPECIALS:
        assert rebuilt.encode(token).ids == [tokens.index(token)]
    assert rebuilt.get_vocab_size() == len(tokens) == 1024
    assert all(rebuilt.token_to_id(token) == number for number, token in enumerate(tokens))


def test_control_tokens_are_skipped_and_text_like_ones_are_not(rebuilt):
    ids = rebuilt.encode("<|user|>a<think>b<|endoftext|>").ids
    assert rebuilt.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_no_bos_is_added(rebuilt):
    assert rebuilt.encode("hi", add_special_tokens=True).ids == rebuilt.encode("hi", add_special_tokens=False).ids


def test_text_is_cut_as_glm_4_cuts_it(rebuilt):
    """Known answers: contractions in any case, numbers by three, one space before a word, line ends together."""
    cut = [piece for piece, _ in rebuilt.pre_tokenizer.pre_tokenize_str("I'M 12345  ok!\n\nx")]
    assert cut == ["I", "'M", "Ġ", "123", "45", "Ġ", "Ġok", "!ĊĊ", "x"]


def test_ignore_merges_takes_a_known_word_whole(make, small_metadata):
    """A word in the vocabulary that merges would not reach: llama.cpp and GLM's tokenizer.json take it as one token."""
    tokens = list(small_metadata["tokenizer.ggml.tokens"])
    first, second = [n for n, token in enumerate(tokens) if len(token) > 2 and token.isascii() and token.isalpha()][:2]
    tokens[first], tokens[second] = "zq", "zqxjk"
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["z q"]}
    tokenizer = build(open_model(make(metadata=keys)))
    assert tokenizer.encode("zqxjk").ids == [second]
    assert tokenizer.encode("zqxj").tokens == ["zq", "x", "j"]


def test_unused_entries_are_no_tokens(make, small_metadata):
    """Padding of the table up to the model's vocabulary: not to be found in text, nor to be printed."""
    tokens = [*small_metadata["tokenizer.ggml.tokens"], "[PAD512]"]
    types = [*small_metadata["tokenizer.ggml.token_type"], 5]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = build(open_model(make(metadata=keys)))
    assert tokenizer.token_to_id("[PAD512]") is None
    assert tokenizer.get_vocab_size() == 512


def test_files(tiny_model, tmp_path):
    write_tokenizer(tiny_model, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 202752,
        "padding_side": "left",
        "eos_token": "<|endoftext|>",
        "pad_token": "[MASK]",
        "bos_token": "[gMASK]",
    }
    assert (tmp_path / "chat_template.jinja").read_bytes().decode() == tiny_tokenizer.CHAT_TEMPLATE


def test_a_model_without_template_gets_no_file(make, tmp_path):
    write_tokenizer(open_model(make(metadata={"tokenizer.chat_template": None})), tmp_path)
    assert (tmp_path / "tokenizer.json").exists() and not (tmp_path / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"tokenizer.ggml.model": "llama"}, "the tokenizer is llama cut by glm4, expected gpt2 cut by glm4"),
        ({"tokenizer.ggml.pre": "qwen2"}, "the tokenizer is gpt2 cut by qwen2"),
        ({"tokenizer.ggml.pre": None}, "cut by None"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "512 tokens but 2 token types"),
    ],
)
def test_other_tokenizers_are_refused(make, tmp_path, keys, what):
    with pytest.raises(GGUFProblem, match=what):
        write_tokenizer(open_model(make(metadata=keys)), tmp_path)


def test_training_is_deterministic(original):
    assert tiny_tokenizer.train().to_str() == original.to_str()


def test_too_little_text_for_a_big_vocabulary():
    with pytest.raises(ValueError, match="too short"):
        tiny_tokenizer.train(50000)
