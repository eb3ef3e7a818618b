from __future__ import annotations

import json
from itertools import pairwise

import pytest
import regex
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
    "Привет, мир! Ελληνικά עברית العربية हिन्दी ไทย",
    "e\u0301 combining, Ⅷ roman, ½ fraction, ٣٤٥٦ digits, \U0001d7d8\U0001d7d9 doubled",
    "👨\u200d👩\u200d👧\u200d👦 family 🏳\ufe0f\u200d🌈 flag ☃\ufe0f",
    "DON'T don'T I'LL we'Ve 'S 'x ''s",
    "a\u2028b\u0085c\u000bd \r \r\n x",
    "<|user|><|user|>你好<|assistant|><think></think>\n好[MASK]<|observation|>🙂<tool_call>{}</tool_call>/nothink",
    "def f(x):\n    return {'a': [1, 2]}  # done\n",
]
SPECIALS = [*tiny_tokenizer.SPECIAL, *tiny_tokenizer.TEXT_LIKE]


class LlamaCpp:
    """What llama.cpp does with these tables (its llama-vocab.cpp, for a glm4 BPE with special tokens parsed): special
    tokens out of the text first, the longest first; the text cut by a pattern; a piece that is a token taken whole;
    else the pair of the lowest rank, the leftmost of equals, merged again and again."""

    CUT = regex.compile(
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def __init__(self, metadata):
        tokens, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
        self.numbers = {token: number for number, token in enumerate(tokens)}
        self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(metadata["tokenizer.ggml.merges"])}
        self.specials = sorted((t for t, k in zip(tokens, kinds, strict=True) if k in (3, 4)), key=len, reverse=True)
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
        hidden = [byte for byte in range(256) if byte not in shown]
        self.letters = dict(zip([*shown, *hidden], map(chr, [*shown, *range(256, 256 + len(hidden))]), strict=True))

    def encode(self, text):
        parts = [(text, False)]
        for special in self.specials:
            parts = [done for part in parts for done in self._without(special, *part)]
        return [number for part, whole in parts for number in ([self.numbers[part]] if whole else self._plain(part))]

    def _without(self, special, text, whole):
        if whole:
            return [(text, True)]
        first, *others = [(piece, False) for piece in text.split(special)]
        return [first, *(piece for other in others for piece in ((special, True), other))]

    def _plain(self, text):
        for piece in self.CUT.findall(text):
            word = "".join(self.letters[byte] for byte in piece.encode())
            yield from map(self.numbers.__getitem__, [word] if word in self.numbers else self._merged(list(word)))

    def _merged(self, symbols):
        never = len(self.ranks)
        while len(symbols) > 1:
            rank, at = min((self.ranks.get(pair, never), at) for at, pair in enumerate(pairwise(symbols)))
            if rank == never:
                break
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        return symbols


@pytest.fixture(scope="module")
def llama_cpp(tiny_model):
    return LlamaCpp(tiny_model.metadata)


@pytest.fixture(scope="module")
def original():
    return tiny_tokenizer.train()


@pytest.fixture(scope="module")
def rebuilt(tiny_model, tmp_path_factory):
    from tokenizers import Tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(tiny_model, directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def transformers_own(tiny_model, tmp_path_factory):
    """As vLLM loads it."""
    from transformers import AutoTokenizer

    from shim.gguf.hf_directory import hf_directory

    return AutoTokenizer.from_pretrained(hf_directory(tiny_model, tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("text", TEXTS)
def test_equal_to_the_trained_one_to_llama_cpps_and_back_again(original, rebuilt, transformers_own, llama_cpp, text):
    ids = rebuilt.encode(text).ids
    assert ids == original.encode(text).ids == llama_cpp.encode(text) == transformers_own(text)["input_ids"]
    assert transformers_own.decode(ids) == text
    assert rebuilt.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.one_of(st.text(max_size=12), st.sampled_from([*SPECIALS, *TEXTS])), max_size=6))
def test_any_text_survives(original, rebuilt, llama_cpp, pieces):
    text = "".join(pieces)
    ids = rebuilt.encode(text).ids
    assert ids == original.encode(text).ids
    # the one letter beyond ASCII that `(?i:'s)` takes and llama.cpp does not is the long s
    assert "\u017f" in text or ids == llama_cpp.encode(text)
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
        ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens is no table of str"),
        ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges is no table of str"),
        ({"tokenizer.ggml.merges": ["zq zx"]}, "merge 0, 'zq zx', needs 'zq', which is none of its 512 tokens"),
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
