"""The tokenizer of a GGUF file, rebuilt for the `tokenizers` library: the token ids are those of llama.cpp.

Where llama.cpp only approximates the model's own tokenizer.json, the model's own rule holds:

- the patterns of tekken and gpt-4o tell upper from lower case in all scripts, and keep accents with their letter;
- an ordinary token that is spelled `</s>` (Qwen has one) is text, not a control token;
- Phi-3's control tokens swallow all spaces after them, not only those of ASCII.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import InvalidModel

if TYPE_CHECKING:
    import tokenizers

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

# Tokens that end a turn in chat templates; many files name only the end of the document in eos_token_id.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_HARMONY_ENDINGS = ("<|return|>", "<|call|>")
# Control tokens whatever a file marks them as.
_ALWAYS_CONTROL = (*_END_OF_TURN, "<|endoftext|>", "<|end_of_text|>")
# The ids that SentencePiece models use when a file names no others.
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
# Phi-3's control tokens swallow the spaces and newlines after them, except these.
_PHI3_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")

_MAX_SPLITS = 8  # ways to split a token into two others, on average; Llama 2 has 2

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
# What llama.cpp does for files that name no pre-tokenizer, in one pattern: punctuation is cut out first, then GPT-2's
# words, then numbers without their space, three ASCII digits at a time.
_DEFAULT = (
    r"[\p{P}$+<=>^~|]+| ?\p{L}+|[0-9]{3}|(?:(?![0-9]{3})\p{N})+| ?[^\s\p{L}\p{N}\p{P}$+<=>^~|]+"
    r"|\s+(?=[\p{P}$+<=>^~|])|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0")
# By tokenizer.ggml.pre: a pattern that cuts first, and whether GPT-2's pattern (built into ByteLevel) cuts afterwards.
_WORD_CUTS = {
    "default": (_DEFAULT, False),
    **dict.fromkeys(("gpt-2", "mellum", "trillion", "a.x-4.0", "granite-docling"), ("", True)),
    **dict.fromkeys(("smollm", "refact", "minerva-7b"), (r"\p{N}", True)),  # smollm: SmolLM2; refact: Granite 3
    **dict.fromkeys(_LLAMA3_NAMES, (_LLAMA3, False)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), (_LLAMA3, False)),  # smaug-bpe: SmolLM3; dbrx: Granite 4, Phi-4
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2, False)),  # qwen2: Qwen2, Qwen2.5, Qwen3
    "tekken": (_TEKKEN, False),  # Mistral NeMo and later
    "gpt-4o": (_GPT4O, False),  # Phi-4-mini
}
# Vocabularies whose whole words are looked up before any merge, and which begin a text with the BOS token.
_WHOLE_WORDS_FIRST = (*_LLAMA3_NAMES, "tekken")


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
        tokenizer = _sentencepiece(metadata, vocab, types, path)
    else:
        raise InvalidModel(
            f"{path}: tokenizer.ggml.model is {kind!r}, but 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) are "
            "supported; use the safetensors version of this model."
        )
    _add_marked_tokens(tokenizer, metadata)
    _add_bos_and_eos(tokenizer, metadata, path)
    return tokenizer


def token_id(metadata: dict[str, Any], name: str) -> int | None:
    """The id of the bos, eos, eot, eom, unknown or padding token, None where the model has none."""
    declared: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if declared is None and metadata.get("tokenizer.ggml.model") == "llama":
        return _SENTENCEPIECE_IDS.get(name)
    return declared


def eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Every token that ends an answer: those the file declares, and those known to end a turn."""
    declared = (token_id(metadata, name) for name in ("eos", "eot", "eom"))
    ids = [index for index in declared if index is not None]
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    # In gpt-oss a message ends where another may follow; the answer ends with what it returns or calls.
    endings = _HARMONY_ENDINGS if all(token in tokens for token in _HARMONY_ENDINGS) else _END_OF_TURN
    ids += [tokens.index(token) for token in endings if token in tokens]
    return tuple(dict.fromkeys(ids))


def special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    """The named tokens that chat templates may use: bos_token, eos_token and so on."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: token_id(metadata, field) for name, field in names.items()}
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
    metadata: dict[str, Any], vocab: dict[str, int], types: Sequence[int], path: Path
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _field(metadata, "scores", path)
    unknown = special_tokens(metadata).get("unk_token")
    unknown = unknown if unknown in vocab else None  # it may be marked as unused
    never_merged = {index for index, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)}
    merges = _merges_from_scores({t: index for t, index in vocab.items() if index not in never_merged}, scores, path)
    tokenizer = Tokenizer(
        _bpe(models, path, vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    )
    replace = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        # The space stands in front of every stretch of text between control tokens, also one that begins with a space.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
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


def _add_marked_tokens(tokenizer: tokenizers.Tokenizer, metadata: dict[str, Any]) -> None:
    """Control tokens (special) and user-defined tokens (plain) are matched whole in any text."""
    from tokenizers import AddedToken

    special, plain = [], []
    names = f"{metadata.get('general.architecture')} {metadata.get('general.name')}".lower()
    is_phi3 = "phi3" in names or "phi-3" in names
    strips = is_phi3 and metadata["tokenizer.ggml.model"] == "llama"  # Phi-4, of the same architecture, has another
    tokens = metadata["tokenizer.ggml.tokens"]
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", [0] * len(tokens)), strict=True):
        if kind == _UNUSED:
            continue
        strip = strips and token not in _PHI3_NOT_STRIPPED
        if kind in (_CONTROL, _UNKNOWN) or token in _ALWAYS_CONTROL or (token, kind) == ("</s>", _USER_DEFINED):
            special.append(AddedToken(token, normalized=False, special=True, rstrip=strip))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False, rstrip=strip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_bos_and_eos(tokenizer: tokenizers.Tokenizer, metadata: dict[str, Any], path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokens = metadata["tokenizer.ggml.tokens"]
    has_bos = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    ids = {}
    for name, by_default in (("bos", has_bos), ("eos", False)):
        index = token_id(metadata, name)
        if metadata.get(f"tokenizer.ggml.add_{name}_token", by_default) and index is not None:
            if not 0 <= index < len(tokens):
                problem = f"tokenizer.ggml.{name}_token_id is {index}, but there are {len(tokens)} tokens"
                raise InvalidModel(f"{path}: {problem}; convert it again.")
            ids[name] = index
    if ids:
        parts = [*(["bos"] if "bos" in ids else []), "$A", *(["eos"] if "eos" in ids else [])]
        named = [{"id": name, "ids": [index], "tokens": [tokens[index]]} for name, index in ids.items()]
        tokenizer.post_processor = TemplateProcessing(single=parts, special_tokens=named)


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
