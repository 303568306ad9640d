"""GBNF: the texts that the parser takes are those of the grammar, and what is no GBNF is refused with a sentence."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.errors import InvalidParameter
from foredraft.sampling.gbnf import Chars, Either, Joined, Node, Repeated, Rule, parse
from foredraft.sampling.gbnf_lexemes import to_lark

llguidance = pytest.importorskip("llguidance")

JSON = r"""
# any value
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] ws term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
BULLETS = 'root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"'
MOVES = r"""
root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")*
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"""
KANA = "root ::= kana-char+ ([ \\t\\n] kana-char+)*\nkana-char ::= [ぁ-ゟ] |\n  [ァ-ヿ]"
C_LIKE = r"""
root       ::= (function)*
function   ::= type ws name "(" (type ws name)? ")" ws "{" ws statement* "}" ws
type       ::= "int" | "float" | "char"
name       ::= [a-zA-Z_] [a-zA-Z_0-9]*
statement  ::= ( type ws name ws "=" ws sum ";" | name ws "=" ws sum ";" | "return" ws sum ";"
             | "while" "(" sum ")" "{" ws statement* "}" ) ws
sum        ::= factor (("+" | "-") factor)*
factor     ::= name | [0-9]+ | "(" sum ")"
ws         ::= ([ \t\n]+)?
"""
EXAMPLES = [
    (JSON, ['{"a": [1, -2.5e3, {"b": null}], "c": "x\\n"}', "[]", "0", '"é"'], ["{", "01", "{'a': 1}", "[1,]", "nul"]),
    (SUMS, ["x+ 1=y\n", "(a*b)=3 \n\n", "x=y\n\nz=1\n\n"], ["x=y", "=1\n", "(a=1\n"]),
    (BULLETS, ["- a\n", "- one\n- two: 2\n"], ["- a", "a\n", "- \n"]),
    (MOVES, ["1. e4 e5\n", "1. e4 e5\n2. Nf3 Nc6\n3. O-O bxc6=Q+\n"], ["1. e4\n", "e4 e5\n", "1. e9 e5\n"]),
    (KANA, ["ひらがな カタ", "あ"], ["kana", "あ  い", ""]),
    (
        C_LIKE,
        ["int f(){return 1;}", "int ifx(int y) { float x = y+1; while(x){ y = (x); } return y-2; }\n", ""],
        ["int f()", "int f(){return;}", "f(){}"],
    ),
]


def takes(lark: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(lark), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("gbnf", "texts", "others"), EXAMPLES)
def test_well_known_grammars(gbnf: str, texts: list[str], others: list[str]) -> None:
    lark = to_lark(gbnf)
    assert [text for text in texts if not takes(lark, text)] == []
    assert [text for text in others if takes(lark, text)] == []


def ends(rules: dict[str, Node], node: Node, text: str, start: int, depth: int = 0) -> set[int]:
    """Where what a node matches from `start` on may end."""
    if isinstance(node, Rule):
        return ends(rules, rules[node.name], text, start, depth + 1) if depth <= 12 else set()
    if isinstance(node, Chars):
        fits = start < len(text) and any(low <= ord(text[start]) <= high for low, high in node.ranges)
        return {start + 1} if fits else set()
    if isinstance(node, Either):
        return {end for item in node.items for end in ends(rules, item, text, start, depth)}
    if isinstance(node, Joined):
        places = {start}
        for item in node.items:
            places = {end for place in places for end in ends(rules, item, text, place, depth)}
        return places
    assert isinstance(node, Repeated)
    found, places = set[int](), {start}
    for count in range(len(text) + node.least + 1):
        found |= places if count >= node.least else set()
        if count == node.most:
            break
        places = {end for place in places for end in ends(rules, node.item, text, place, depth)}
    return found


ITEMS = st.sampled_from(['"a"', '"b"', '"ab"', "[ab]", "[a-b]*", '"a"?', "[^b]+", '"b"{1,2}', "x", "y", '("a" | x)'])
RULE = st.lists(st.lists(ITEMS, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=2).map(" | ".join)
TEXTS = ["".join(letters) for length in range(5) for letters in product("ab", repeat=length)]


@settings(max_examples=150, deadline=None)
@given(RULE, RULE, RULE)
def test_the_texts_are_those_of_the_grammar(root: str, x: str, y: str) -> None:
    """Also where the longest match would be the wrong one. Every recursion passes brackets, so that it ends."""
    gbnf = f'root ::= {root}\nx ::= "a" | "b" ({y}) "a" | "ba"\ny ::= "b" | "a" ({x}) "b"'
    rules, lark = parse(gbnf), to_lark(gbnf)
    for text in TEXTS:
        assert takes(lark, text) == (len(text) in ends(rules, rules["root"], text, 0)), text


@pytest.mark.parametrize(
    ("gbnf", "sentence"),
    [
        ("", "it has no rule root"),
        ('top ::= "a"', "it has no rule root"),
        ("root ::= item", "the rule 'item' is not defined"),
        ('root ::= "a', "line 1 of the GBNF cannot be read"),
        ('root ::= ("a"', "a bracket is not closed"),
        ("root ::= *", "'\\*' has nothing in front of it"),
        ('root ::= "a" )', "'\\)' stands where a rule should begin"),
        ("root ::= [b-a]", "has a range whose end comes first"),
        ("root ::= " + "(" * 5000, "brackets are open at once"),
        ('root ::= "a"' + "*" * 20_000, "the GBNF is too large"),
        ('root ::= "a"{90000}', "the GBNF is too large"),
        ('root ::= ""' + "{90000}" * 900, "the GBNF is too large"),
        ("".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(90)) + 'r90 ::= "a"\nroot ::= r0', "too large"),
        ("root ::= r0\n" + "".join(f'r{n} ::= "a" r{n}\n' for n in range(3000)), "the GBNF is too large"),
    ],
)
def test_what_cannot_be_used(gbnf: str, sentence: str) -> None:
    with pytest.raises(InvalidParameter, match=rf"^grammar cannot be used: .*{sentence}"):
        to_lark(gbnf)
