"""A GGUF's tokenizer as the files that transformers and vLLM read: byte-level BPE in GLM-4's dialect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shim.gguf.files import GGUFProblem, Model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How GLM-4 and GLM-5 cut text before BPE (the pattern in their tokenizer.json; llama.cpp calls it glm4).
GLM4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# gguf.TokenType. CONTROL: a special token. USER_DEFINED: matched whole, but text. UNUSED: padding of the table.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


def write_tokenizer(model: Model, directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if the GGUF has one, chat_template.jinja.

    Raises GGUFProblem for a tokenizer that is not GLM's.
    """
    build(model).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(_config(model), indent=2), encoding="utf-8")
    template = model.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        # newline="" keeps the line ends of the template: other ones would change the prompt
        with open(directory / "chat_template.jinja", "w", encoding="utf-8", newline="") as file:
            file.write(template)


def build(model: Model) -> Tokenizer:
    """The tokenizer, rebuilt from tokenizer.ggml.{tokens,merges,token_type}."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE

    tokens, types, merges = tables(model)
    vocab = {token: number for number, token in enumerate(tokens) if types[number] != UNUSED}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = dress(Tokenizer(BPE(vocab=vocab, merges=pairs, ignore_merges=True)))
    # Added tokens are in the vocabulary, too, so each keeps its number
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added])
    return tokenizer


def dress(tokenizer: Tokenizer) -> Tokenizer:
    """Makes a BPE model cut text, and write bytes as letters, as GLM does. It adds no BOS: GLM's template has it."""
    from tokenizers import Regex, decoders, pre_tokenizers, processors

    cut = pre_tokenizers.Split(Regex(GLM4_PATTERN), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def tables(model: Model) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges, from the first part's header.

    GGUFProblem unless they are GLM's and fit each other: each merge joins two tokens, and the result is a token.
    """
    found = tuple(model.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if found != ("gpt2", "glm4"):
        raise GGUFProblem(f"the tokenizer is {found[0]} cut by {found[1]}, expected gpt2 cut by glm4; convert it anew")
    tokens, types, merges = _table(model, "tokens", str), _table(model, "token_type", int), _table(model, "merges", str)
    if len(tokens) != len(types):
        raise GGUFProblem(f"{len(tokens)} tokens but {len(types)} token types; convert the model anew")
    known = {token for token, kind in zip(tokens, types, strict=True) if kind != UNUSED}
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not (left in known and right in known and left + right in known):
            strange = next(token for token in (left, right, left + right) if token not in known)
            raise GGUFProblem(
                f"the tokenizer's merge {number}, {merge!r}, needs {strange!r}, which is none of its {len(known)} "
                "tokens; convert the model anew"
            )
    return tokens, types, merges


def _table(model: Model, key: str, kind: type) -> list[Any]:
    table: Any = model.metadata.get(f"tokenizer.ggml.{key}")
    if table is None:
        raise GGUFProblem(f"metadata key tokenizer.ggml.{key} is missing; convert the model anew")
    if not isinstance(table, list) or not isinstance(next(iter(table), kind()), kind):  # an array is of one type
        raise GGUFProblem(f"metadata key tokenizer.ggml.{key} is no table of {kind.__name__}; download it again")
    return table


def _config(model: Model) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.metadata.get("glm-dsa.context_length"),
        "padding_side": "left",
    }
    tokens = model.metadata["tokenizer.ggml.tokens"]
    for name, key in (("eos_token", "eos"), ("pad_token", "padding"), ("bos_token", "bos")):
        number = model.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and number < len(tokens):
            config[name] = tokens[number]
    return config
