"""The tokenizer of a GGUF file, rebuilt for the `tokenizers` library from vocabulary, merges and token types."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import InvalidModel

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type

# Tokens that end a turn in chat templates; many files name only the end of the document in eos_token_id.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>")

_MAX_SPLITS = 8  # of a token into two others, on average; Llama 2 has 2

# How text is cut into words before the merges apply.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By tokenizer.ggml.pre: a pattern that cuts first, and whether GPT-2's pattern (built into ByteLevel) cuts afterwards.
_WORD_CUTS = {
    "default": ("", True),
    "gpt-2": ("", True),
    "smollm": ("", True),  # as transformers reads these files; llama.cpp cuts digits apart first
    "refact": (r"\p{N}", True),  # Granite
    "llama3": (_LLAMA3, False),
    "llama-v3": (_LLAMA3, False),
    "llama-bpe": (_LLAMA3, False),
    "smaug-bpe": (_LLAMA3, False),
    "dbrx": (_LLAMA3, False),
    "qwen2": (_QWEN2, False),
    "deepseek-r1-qwen": (_QWEN2, False),
    "tekken": (_TEKKEN, False),
    "gpt-4o": (_GPT4O, False),
}
# Vocabularies whose whole words are looked up before any merge, and which begin a text with the BOS token.
_WHOLE_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "tekken")


def build(metadata: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    """Raises InvalidModel for a kind of tokenizer that is not known."""
    tokens = _field(metadata, "tokens", path)
    types = metadata.get("tokenizer.ggml.token_type", ())
    unused = {index for index, kind in enumerate(types) if kind == _UNUSED}  # pads the vocabulary to a round number
    vocab = {token: index for index, token in enumerate(tokens) if index not in unused}
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, vocab, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, vocab, len(tokens), path)
    else:
        raise InvalidModel(
            f"{path}: tokenizer.ggml.model is {kind!r}, but 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) are "
            "supported; use the safetensors version of this model."
        )
    _add_marked_tokens(tokenizer, tokens, types)
    _begin_with_bos(tokenizer, metadata, tokens, path)
    return tokenizer


def eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Every token that ends an answer: those the file declares, and control tokens known to end a turn."""
    declared = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ids = [token_id for token_id in declared if token_id is not None]
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type", ())
    control = {tokens[index] for index in range(min(len(tokens), len(types))) if types[index] == _CONTROL}
    ids += [tokens.index(token) for token in _END_OF_TURN if token in control]
    return tuple(dict.fromkeys(ids))


def special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    """The named tokens that chat templates may use: bos_token, eos_token and so on."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{field}_token_id") for name, field in names.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None and 0 <= index < len(tokens)}


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int], path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _WORD_CUTS:
        raise InvalidModel(
            f"{path}: tokenizer.ggml.pre is {pre!r}, but {', '.join(_WORD_CUTS)} are supported; "
            "use the safetensors version of this model."
        )
    merges = [_pair(merge, path) for merge in _field(metadata, "merges", path)]
    tokenizer = Tokenizer(_bpe(models, path, vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    pattern, then_gpt2 = _WORD_CUTS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=then_gpt2)
    split = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    metadata: dict[str, Any], vocab: dict[str, int], num_tokens: int, path: Path
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = _field(metadata, "scores", path)
    if len(scores) != num_tokens:
        raise InvalidModel(f"{path}: tokenizer.ggml.scores has {len(scores)} entries for {num_tokens} tokens.")
    unknown = special_tokens(metadata).get("unk_token")
    unknown = unknown if unknown in vocab else None  # it may be marked as unused
    merges = _merges_from_scores(vocab, scores, path)
    tokenizer = Tokenizer(
        _bpe(models, path, vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    if metadata.get("general.architecture") == "phi3":
        # Phi-3 puts the space in front of every stretch of text, also one that begins with a space.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if prefix_space else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: Sequence[float], path: Path) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose joint token scores best: every split of every token, best score first."""
    merges = []
    most = _MAX_SPLITS * len(vocab) + 1000
    for token, index in vocab.items():
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in splits if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(scores[index], len(left), len(right), left, right) for left, right in known]
        if len(merges) > most:
            problem = f"tokenizer.ggml.tokens has more than {most} splits of a token into two others"
            raise InvalidModel(f"{path}: {problem}, which no SentencePiece vocabulary has; download it again.")
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _add_marked_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: Sequence[int]) -> None:
    """Control tokens (special) and user-defined tokens (plain) are matched whole in any text."""
    from tokenizers import AddedToken

    special, plain = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _begin_with_bos(tokenizer: tokenizers.Tokenizer, metadata: dict[str, Any], tokens: list[str], path: Path) -> None:
    by_default = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", by_default) and bos is not None:
        from tokenizers.processors import TemplateProcessing

        if not 0 <= bos < len(tokens):
            raise InvalidModel(f"{path}: tokenizer.ggml.bos_token_id is {bos}, but there are {len(tokens)} tokens.")
        named = {"id": "bos", "ids": [bos], "tokens": [tokens[bos]]}  # a token may be spelled like a template
        tokenizer.post_processor = TemplateProcessing(single=["bos", "$A"], special_tokens=[named])


def _bpe(models: Any, path: Path, **arguments: Any) -> Any:
    try:
        return models.BPE(**arguments)
    except Exception as error:  # the library raises bare Exception, for instance for a merge of unknown tokens
        raise InvalidModel(f"{path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({error}).") from error


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise InvalidModel(f"{path}: tokenizer.ggml.merges holds {merge!r}, but each entry must be two tokens.")
    return left, right


def _field(metadata: dict[str, Any], name: str, path: Path) -> list[Any]:
    value = metadata.get("tokenizer.ggml." + name)
    if not isinstance(value, list) or not value:
        raise InvalidModel(f"{path}: metadata field tokenizer.ggml.{name} is missing or empty; convert it again.")
    return value
