"""Records: no text, list or mapping of the package carries data beside its items."""

import ast

from recnmt_hf.data.records import Links, ParsedSentence, Sentence


BUILTINS = {"str", "bytes", "int", "float", "list", "tuple", "dict", "set", "UserString", "UserList", "UserDict"}


def base_names(node):
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in bases}


def has_attributes(node):
    """Return whether a class declares attributes, or a method of it assigns one."""
    declared = any(isinstance(part, ast.AnnAssign) for part in node.body)
    stored = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    return declared or any(True for _ in stored)


def test_no_builtin_carries_attributes(repository):
    trees = [ast.parse(path.read_text("utf-8")) for path in (repository / "src").rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    derived, names = set(), set(BUILTINS)
    while found := {node.name for node in classes if base_names(node) & names} - derived:
        derived |= found
        names |= found
    assert {"Memories", "VaswaniLengthPenalty"} <= derived, "these have no attributes"
    assert not [node.name for node in classes if node.name in derived and has_attributes(node)]


def test_a_sentence_of_a_text_or_a_tree():
    parsed = ParsedSentence(["a", "b"], [2, 0], ["x", "root"])
    links = Sentence("c", links=Links("0-0", "links, line 1", "words"))
    for sentence in ("a b", parsed, links):
        record = Sentence.of(sentence)
        assert Sentence.of(record) is record and record.text == str(record) == str(sentence)
    assert Sentence.of(parsed).public == parsed and links.public == "c"
