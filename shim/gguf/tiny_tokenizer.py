"""A real byte-level BPE of about a thousand tokens, with GLM's special tokens and pre-tokenizer, trained here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shim.gguf.tokenizer import CONTROL, USER_DEFINED, dress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# GLM-5's, in its order (ids 154820 and on). Those of TEXT_LIKE are matched whole, but they are text.
SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
TEXT_LIKE = ("<think>", "</think>", "<tool_call>", "</tool_call>", "/nothink")
EOS, PAD, BOS, EOT, EOM = "<|endoftext|>", "[MASK]", "[gMASK]", "<|user|>", "<|observation|>"

CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

_TEXT = """
A language model reads a sequence of tokens and gives a probability to every token that could come next. The weights of
this one are random, so it has nothing to say; but it says it exactly as its large relatives do: queries and keys
pass through low rank projections, an indexer scores every earlier position and keeps the best of them, attention looks
only at those, and a router sends each token to two of eight experts. Whoever changes a kernel, a rotary embedding, a
quantised layer or the order of two shards will see the answer change, and that is what it is for.
The quick brown fox jumps over the lazy dog. It's what we'd call a pangram; they've known it for years, I'm sure you'll
agree that he doesn't mind. Numbers such as 0, 1, 23, 456, 7890, 3.14159 and 1,048,576 are cut into groups of three.
Water flows down the mountain, through the forest, under the bridge and past the village towards the distant sea.
Morning light fell across the table where somebody had left a notebook, three pencils and an unfinished letter.
Engineers measure before they cut; gardeners wait for rain; sailors watch the weather; children ask why.
def greet(name: str, times: int = 1) -> list[str]:
    return [f"Hello, {name}!" for index in range(times)]
class Point(object):
    def __init__(self, x=0.0, y=0.0): self.x, self.y = x, y
for key, value in sorted(config.items()): print(key, "=", value)
import numpy as np; array = np.zeros((4, 8), dtype=np.float32); assert array.shape == (4, 8)
SELECT name, count(*) FROM visits WHERE year >= 2020 GROUP BY name ORDER BY count(*) DESC LIMIT 10;
{"model": "glm", "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true}
人工智能的语言模型读取一串词元并预测下一个词元。今天天气很好，我们一起去公园散步吧。北京是中国的首都，上海是最大的城市。
日本語の文章も少しだけ入れておきます。ありがとうございます。한국어 문장도 조금 있습니다. Привет, мир! Здравствуйте.
Le café est très chaud, mais l'été dernier à Noël c'était déjà différent. Übermäßig große Straßen führen nach Köln.
¿Dónde está la biblioteca? El niño corrió mañana por la mañana hacia el río. Ελληνικά γράμματα: α β γ δ ε ζ η θ.
Emoji count as text as well: 🙂 🚀 🌍 ❤️ 👩‍💻 and so do symbols such as → ≤ ≠ ∑ √ ∞ € £ ¥ © ™.
"""  # noqa: RUF001


def train(vocab: int = 1024) -> Tokenizer:
    """Trains the tokenizer. The same `vocab` gives the same tokens every time. ValueError if it is too large."""
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
    from tokenizers.models import BPE

    added = [*SPECIAL, *TEXT_LIKE]
    tokenizer = dress(Tokenizer(BPE(ignore_merges=True)))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(added),
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    if tokenizer.get_vocab_size() != vocab - len(added):
        raise ValueError(f"the text is too short for {vocab} tokens: it gave {tokenizer.get_vocab_size()}")
    tokenizer.add_tokens([AddedToken(token, special=token in SPECIAL, normalized=False) for token in added])
    return tokenizer


def gguf_tables(tokenizer: Tokenizer) -> tuple[list[str], list[int], list[str]]:
    """tokens, token types and merges as llama.cpp's converter writes them."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = dict.fromkeys(SPECIAL, CONTROL) | dict.fromkeys(TEXT_LIKE, USER_DEFINED)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokens, [kinds.get(token, 1) for token in tokens], [" ".join(pair) for pair in merges]
