"""Bytes that are no JSON object, and what is said of them."""

import msgspec
import pytest

from server.api.strict_json import parse_json
from server.errors import MalformedBody


# rule: Errors: NaN, infinities, numbers too large, lone surrogates are 400
# rule: Limits: JSON 64 levels deep
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"3", b"null", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}', b'{"a": "\\ud800"}',
        b'{"a": "\xff"}', b"\xef\xbb\xbf{}", b"{'a': 1}", b'{"a": 1,}', b"[" * 100_000,
        b'{"a":' * 65 + b"1" + b"}" * 65,
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object_are_refused(body):
    with pytest.raises(MalformedBody):
        parse_json(body)


# rule: Errors: NaN, infinities, numbers too large, lone surrogates are 400
@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"a": "\\ud800"}', r"\ud800 at byte 7"), (b'{"a": "x\\ud800y"}', r"\ud800 at byte 8"),
        (b'{"a": "\\uDC00"}', r"\uDC00 at byte 7"), (b'{"a": "\\ud800\\u0041"}', r"\ud800 at byte 7"),
        (b'{"\\ud800": 1}', r"\ud800 at byte 2"), (b'{"a": "\\ud83d\\ude00 \\\\ \\ud83d"}', r"\ud83d at byte 23"),
        (b'{"a": "\xed\xa0\x80"}', "lone surrogate"),
    ],
)  # fmt: skip
def test_a_lone_surrogate_is_called_so(body, where):
    with pytest.raises(MalformedBody) as info:
        parse_json(body)
    assert "a lone surrogate" in info.value.message
    assert info.value.message.endswith("which is not valid Unicode text.")
    assert where in info.value.message


@pytest.mark.parametrize("body", [b'{"a": "\\\\ud800', b'{"a": "\\ud83d\\ude00', b'{"a": "\xff"}', b'{"a": "\\u00'])
def test_other_faults_of_text_are_not(body):
    with pytest.raises(MalformedBody) as info:
        parse_json(body)
    assert "surrogate" not in info.value.message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "The body is empty; it must be a JSON object."),
        (b" \n", "The body is empty; it must be a JSON object."),
        (b"\xef\xbb\xbf{}", "The body begins with a byte order mark; it must be UTF-8 without one."),
        ("{}".encode("utf-16"), "The body begins with a byte order mark; it must be UTF-8 without one."),
        (b'{"a": "\xe9"}', "The body is not UTF-8: e9 at byte 7."),
        (b"{'a': 1}", "object keys must be strings (byte 1): texts and names are in double quotes, \" and not '."),
        (b'{"a": True}', "invalid character (byte 6): JSON writes true, false and null."),
        (b'{"a": NaN}', "invalid character (byte 6): JSON has finite numbers only."),
        (b'{"a": "x\ny"}', "within a text a line break is written \\n, a tab \\t."),
        (b'{"a": 1,}', "trailing comma in object (byte 8)."),
        (b'{"a": "x', "The body is not valid JSON: it ends too early."),
        (b'{"a": "1e999", "b": [1e400]}', "The body has a number beyond those of 64-bit floats, 1e400."),
        (b'{"a": -' + b"9" * 5000 + b"}", f"beyond those of 64-bit floats, -{'9' * 39}…."),
    ],
)
def test_a_body_that_does_not_parse_is_told_what_is_wrong(body, said):
    with pytest.raises(MalformedBody) as info:
        parse_json(body)
    assert info.value.message.endswith(said)
    assert "malformed: " not in info.value.message


# rule: Errors: a field twice in one object is a 400
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"a": 1, "a": 2}', "The body has the field 'a' twice"),
        (b'{"a": 1, "\\u0061": 1}', "The body has the field 'a' twice"),
        (b'{"m": [[1, {"x": {"b": 1, "c": [], "b": 1}}]], "n": {}}', "The body has the field 'b' twice"),
        (b'{"": 1, "": 2}', "The body has the field '' twice"),
        (b'{"' + b"k" * 999 + b'": 1, "' + b"k" * 999 + b'": 2}', f"The body has the field '{'k' * 40}' twice"),
        (b'{"p": [' + b"5," * 2**20 + b'5], "n": 1, "n": 2}', "The body has a field twice"),
    ],
    ids=["first", "escaped", "within", "empty", "long", "large"],
)
def test_a_field_that_an_object_has_twice_is_refused(body, said):
    with pytest.raises(MalformedBody) as info:
        parse_json(body)
    assert info.value.message == f"{said} in one object; only one of them can count."


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 1}]}', b'{"a:": ":", "b": "\\":\\\\", "c": {}}', b"{}",
        b'{"a": [[], [[{"b": 1}]], {"c": [{"d": 1}]}]}',
    ],
)  # fmt: skip
def test_the_same_name_in_several_objects_is_fine(body):
    assert parse_json(body) == msgspec.json.decode(body)


def test_a_fault_in_8_mib_of_escapes_is_found_soon_enough():
    """One pass, no backtracking: a body that is as large as bodies may be must not hold up the others."""
    with pytest.raises(MalformedBody, match="lone surrogate"):
        parse_json(b'{"a": "' + b"\\ud83d\\ude00\\n" * (2**23 // 14) + b"\\ud83d")


# rule: Limits: JSON 64 levels deep
def test_depth_64_is_still_fine():
    assert parse_json(b'{"a":' * 64 + b"1" + b"}" * 64)
    wide = msgspec.json.encode({"a": [{"b": [i]} for i in range(1000)]})
    assert len(parse_json(wide)["a"]) == 1000
