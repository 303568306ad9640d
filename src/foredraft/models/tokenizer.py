"""Text to token ids and back, and conversations to prompts, over the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.answers import HARMONY_TAGS, START, TAGS, THINK, AnswerFormat
from foredraft.errors import InvalidModel, InvalidPrompt
from foredraft.models.chat_template import ChatTemplate, Message, check_messages
from foredraft.models.content_escape import ContentEscape, StandIns, looks_like_control, unescape
from foredraft.models.fields import read_json
from foredraft.models.fill_in import FillInTokens, fill_in_tokens
from foredraft.models.gguf import tokenizer as gguf_tokenizer
from foredraft.models.least_tokens import LeastTokens
from foredraft.models.tokenizer_limits import check_tokenizer_file, max_prompt_bytes, raise_as
from foredraft.tool_calls import with_tool_prompt

if TYPE_CHECKING:
    import tokenizers

_CONTINUED = "\ufdd0continued\ufdd0"  # marks the end of a message that the answer goes on with
_MOST_OF_A_TAG = 10  # tokens of <think> and spaces behind it
_NO_CHARACTER = "\ufffd"  # what decoders write for bytes that are no character (yet)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte that is no character
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _byte_level() -> dict[str, int]:
    """The bytes that characters of byte-level tokens stand for: printable ones for themselves, others for the rest."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    rest = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(rest)}


_BYTE_LEVEL = _byte_level()


class Tokenizer:
    """One model's tokenizer.

    bos_token_id   the token that begins a text, None where the model has none
    eos_token_ids  the tokens that end an answer
    vocab_size     largest token id + 1; the model's logits may be wider
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        special_tokens: dict[str, str],
        chat_template: str | None,
    ) -> None:
        from tokenizers.decoders import ByteLevel

        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._max_bytes = max_prompt_bytes(backend)
        self._chat_template = ChatTemplate(chat_template, special_tokens) if chat_template else None
        self._config = {**special_tokens, **({"chat_template": chat_template} if chat_template else {})}
        added = backend.get_added_tokens_decoder()
        self._special_ids = {index for index, token in added.items() if token.special}
        self._answer_format = AnswerFormat.of(chat_template or "", {token.content for token in added.values()})
        told = (*TAGS, *HARMONY_TAGS) if self._answer_format.is_harmony else TAGS
        self._told_ids = {index for index, token in added.items() if token.content in told}
        control_ids = {*self._special_ids, *eos_token_ids, bos_token_id}
        control = [t.content for index, t in added.items() if index in control_ids or looks_like_control(t.content)]
        self._content_escape = ContentEscape(control, chat_template or "")
        self._chat_backend: tuple[StandIns, tokenizers.Tokenizer] | None = None  # the one used last
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        vocabulary = backend.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._least_tokens = LeastTokens(backend, vocabulary, _BYTE_LEVEL)
        # Whether a text is the bytes of its tokens one behind the other, so that no token looks at another.
        self._joins_bytes = isinstance(backend.decoder, ByteLevel)
        self._own_texts: dict[int, str] = {}  # what `own_text` has found out

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any], path: Path) -> Tokenizer:
        """From the metadata of a GGUF file; `path` is for messages."""
        return cls(
            gguf_tokenizer.build(metadata, path),
            gguf_tokenizer.token_id(metadata, "bos"),
            gguf_tokenizer.eos_token_ids(metadata),
            gguf_tokenizer.special_tokens(metadata),
            metadata.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, folder: Path, eos_token_ids: tuple[int, ...] = ()) -> Tokenizer:
        """From tokenizer.json and the files beside it; `eos_token_ids` are the model's, if it has any."""
        import tokenizers

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise InvalidModel(f"{folder} has no tokenizer.json; save it with transformers (save_pretrained).")
        check_tokenizer_file(file, read_json(file))
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as error:
            raise_as(InvalidModel, f"{file} cannot be read", "download the model again", error)
        config = read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens({**read_json(folder / "special_tokens_map.json"), **config})
        ids = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
        own_eos = ids.get("eos_token")
        if not eos_token_ids and own_eos is not None:
            eos_token_ids = (own_eos,)
        return cls(backend, ids.get("bos_token"), eos_token_ids, special_tokens, _chat_template(folder, config))

    def save(self, folder: Path) -> None:
        """Writes the files that `from_folder` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a plain prompt. Control tokens spelled out in it are recognised: whoever writes a plain prompt
        writes all of it. For text of others use a conversation.

        A text that is sure to have more than `max_tokens` is refused before it is tokenised."""
        if not isinstance(text, str):
            raise InvalidPrompt(f"A prompt must be a string or a list of token ids, not {type(text).__name__}.")
        self._check_length(text, max_tokens)
        return _ids(self._backend, text, add_special_tokens, self._max_bytes)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Of the special tokens, those stay in any text that tell thoughts, messages and calls apart."""
        if skip_special_tokens and not self._told_ids.isdisjoint(ids):
            skip_special_tokens = False
            ids = [index for index in ids if index in self._told_ids or not self.is_special(index)]
        # The library holds the interpreter's lock while it decodes one text, and not while it decodes several.
        try:
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except BaseException as error:
            raise_as(InvalidModel, "The model's tokenizer cannot write these tokens", "use another", error)

    def text_of(self, token_id: int) -> str | None:
        """What the token adds to any text of whole characters; None where that depends on its neighbours."""
        if not self._joins_bytes or self.is_special(token_id):
            return None
        text = self.own_text(token_id)
        return text if text and _NO_CHARACTER not in text else None

    def own_text(self, token_id: int) -> str:
        """The token as a text of its own, special ones too. Known from the second time on: answers with log
        probabilities need it for every alternative."""
        if token_id not in self._own_texts:
            self._own_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return self._own_texts[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        """The token's own bytes, also where they are only a part of a character."""
        text = self.own_text(token_id)
        token = self._backend.id_to_token(token_id) if _NO_CHARACTER in text else None
        if token is not None:
            if found := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(found[1], 16)])
            if self._joins_bytes and all(character in _BYTE_LEVEL for character in token):
                return bytes(_BYTE_LEVEL[character] for character in token)
        return text.encode()

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt that the model's chat template makes of a conversation."""
        return unescape(*self._render(messages, add_generation_prompt))

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return self._config.get("chat_template")

    def warm_chat(self) -> None:
        """Start what the first conversation would wait for."""
        if self._chat_template is not None:
            self._chat_template.warm()

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        max_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer. `tools` are OpenAI's descriptions of functions, which go
        into the system prompt where the template has no place for them, and `variables` others that it may read. With
        `continues` the answer goes on with the last message, else `add_generation_prompt` begins a new one. A
        conversation that is sure to have more than `max_tokens` is refused before it is tokenised.

        The template writes the control tokens. Those spelled out in a message become ids of ordinary text. Tokens that
        the file calls user-defined, like <think> or <tool_call>, are recognised everywhere: models write them in their
        answers, which come back as content.
        """
        text, stand_ins = self._render(messages, add_generation_prompt, tools, variables, continues)
        return self._encode_escaped(text, stand_ins, max_tokens)

    def answer_format(self, prompt: Sequence[int], has_grammar: bool = False) -> AnswerFormat:
        """How the answer to this prompt is to be read. Prompts may end inside a thought, or in the header of a message.
        A grammar makes another answer, from its first token on."""
        known = self._answer_format
        if has_grammar:
            return known
        if known.is_harmony:
            start = self._backend.token_to_id(START)
            place = next((place for place in reversed(range(len(prompt))) if prompt[place] == start), len(prompt))
            return replace(known, begun=self.decode(prompt[place:]))
        if known.thinks and self.decode(prompt[-_MOST_OF_A_TAG:]).rstrip().endswith(THINK):
            return replace(known, begun=THINK)
        return known

    @cached_property
    def fill_in(self) -> FillInTokens | None:
        """The tokens for fill-in-the-middle, if the model has them."""
        return fill_in_tokens(self.vocabulary())

    def encode_fill_in(
        self,
        before: str,
        behind: str,
        files: Sequence[tuple[str, str]] = (),
        begun: str = "",
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a text with a gap, ready for what fills it. What is spelled in the texts is text."""
        if self.fill_in is None:
            raise InvalidPrompt(
                "This model has no tokens for fill-in-the-middle and only continues a prompt; Qwen2.5-Coder has them."
            )
        texts = {"before": before, "behind": behind, "begun": begun, "files": [list(file) for file in files]}
        (escaped,), stand_ins = self._content_escape.escape([texts])
        text = self.fill_in.prompt(**{**escaped, "files": [tuple(file) for file in escaped["files"]]})
        return [*self.encode(""), *self._encode_escaped(text, stand_ins, max_tokens)]

    def _encode_escaped(self, text: str, stand_ins: StandIns, max_tokens: int | None) -> list[int]:
        """Of a text in which control tokens are meant, and in which `stand_ins` stand for those that are not."""
        self._check_length(unescape(text, stand_ins), max_tokens)
        chat_backend = self._chat_backend
        if chat_backend is None or chat_backend[0] != stand_ins:
            chat_backend = self._chat_backend = stand_ins, self._content_escape.tokenizer(self._backend, stand_ins)
        return _ids(chat_backend[1], text, False, self._max_bytes)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> tuple[str, StandIns]:
        if self._chat_template is None:
            raise InvalidPrompt("This model has no chat template; use generate with a plain prompt.")
        checked = check_messages(messages)
        if tools and not self._chat_template.takes_tools:
            checked, tools = with_tool_prompt(checked, tools), None
        others: dict[str, Any] = {"tools": list(tools) if tools else None, "variables": dict(variables or {})}
        escaped, stand_ins = self._content_escape.escape([*checked, others])
        *conversation, others = escaped
        if continues:
            conversation[-1]["content"] += _CONTINUED
            add_generation_prompt = False
        text = self._chat_template.render(conversation, add_generation_prompt, others["tools"], others["variables"])
        if continues:
            text, found, _ = text.rpartition(_CONTINUED)
            if not found:
                raise InvalidPrompt("The model's chat template leaves out the last message, so none can continue it.")
        return text, stand_ins

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None and self._least_tokens.count(text) > max_tokens:
            raise InvalidPrompt(
                f"The prompt has {len(text)} characters and so more than the {max_tokens} tokens that fit; shorten it."
            )

    def vocabulary(self) -> dict[str, int]:
        """All tokens with their ids, special ones too."""
        return self._backend.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """The tokenizer as the `tokenizers` library saves it."""
        return self._backend.to_str()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids


def _ids(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, max_bytes: int) -> list[int]:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        problem = f"holds a lone surrogate at character {error.start}"
        raise InvalidPrompt(f"The prompt {problem}; send valid Unicode.") from error
    if num_bytes > max_bytes:
        raise InvalidPrompt(
            f"The prompt has {num_bytes} bytes, but this model's tokenizer takes at most {max_bytes}; shorten it."
        )
    # The library holds the interpreter's lock while it encodes one text, and not while it encodes several.
    try:
        return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
    except BaseException as error:
        raise_as(InvalidPrompt, "The model's tokenizer cannot read this prompt", "change it", error)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    values = {name: config.get(name) for name in _SPECIAL_NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default template: chat_template.jinja, or the one inside tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
