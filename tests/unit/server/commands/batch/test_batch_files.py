"""The files of `quire batch`: lines that are checked, records that are whole or not there, an index out of memory."""

import io
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.commands.batch import records as batch_input
from server.commands.batch.output import BatchResponse, OutputFile, new_record
from server.commands.batch.records import BatchIndex, BatchRequest, LineError, parse_line, read_lines
from server.commands.batch.send import retry_after_s
from server.commands.server_target import ToolError

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}


def fault(line, number=7):
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    with pytest.raises(LineError) as caught:
        parse_line(data, number)
    return caught.value


def test_a_good_line_keeps_its_body_byte_for_byte():
    body = b'{"model": "m",  "n": 1.50, "seed": 123456789012345678901234567890, "x": "\\u00e9"}'
    line = b'{"body":' + body + b',"url":"/v1/completions","method":"POST","custom_id":"\\u00e9"}\r\n'
    assert parse_line(line, 1) == BatchRequest("é", "/v1/completions", body, "m")


@pytest.mark.parametrize(
    ("change", "code", "param", "words"),
    [
        ({"custom_id": 5}, "invalid_custom_id", "custom_id", "custom_id is 5,"),
        ({"custom_id": ""}, "invalid_custom_id", "custom_id", 'custom_id is "",'),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id", "1 to 512"),
        ({"method": "GET"}, "invalid_method", "method", 'method is "GET", it must be POST'),
        ({"url": "/v1/images"}, "invalid_url", "url", "/v1/completions or /v1/embeddings"),
        ({"url": ["x"]}, "invalid_url", "url", 'url is ["x"]'),
        ({"body": [1]}, "invalid_body", "body", "body is [1], it must be a JSON object"),
        ({"body": {"stream": True}}, "invalid_body", "body.stream", "body.stream is true"),
    ],
)
def test_a_wrong_field_is_named_with_its_line_and_value(change, code, param, words):
    error = fault(LINE | change)
    assert (error.code, error.param) == (code, param)
    assert error.message.startswith("Line 7: ")
    assert words in error.message
    assert error.custom_id == (None if param == "custom_id" else "a")


@pytest.mark.parametrize("name", list(LINE))
def test_a_missing_field_is_named(name):
    error = fault({key: value for key, value in LINE.items() if key != name})
    assert (error.code, error.param, error.message) == ("missing_field", name, f"Line 7: {name} is missing.")


@pytest.mark.parametrize("line", [b"{", b"[]", b"null", b'"x"', b'{"a": NaN}', b'{"a": "\xff"}', b"{}x", b"[" * 9999])
def test_what_is_no_json_object_is_said_with_its_line(line):
    error = fault(line)
    assert error.code == "invalid_json_line"
    assert error.message.startswith("Line 7 is no")


@given(st.binary(max_size=60) | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(str).map(str.encode))
def test_any_bytes_are_a_request_or_a_fault(data):
    assert "ine 1" in outcome(data) or outcome(data) == "request"


@given(
    st.fixed_dictionaries(
        {name: st.sampled_from([None, 1, "", "a", "POST", "/v1/embeddings", {}, []]) for name in LINE}
    )
)
def test_any_object_is_a_request_or_a_fault(line):
    is_good = line["custom_id"] in ("a", "POST", "/v1/embeddings") and line["method"] == "POST"
    is_good = is_good and line["url"] == "/v1/embeddings" and line["body"] == {}
    assert (outcome(json.dumps(line).encode()) == "request") == is_good


def outcome(data):
    """Return "request", or the message of the fault."""
    try:
        parse_line(data, 1)
    except LineError as error:
        return error.message
    return "request"


def test_lines_know_number_and_place_and_blank_ones_are_left_out():
    data = b"\xef\xbb\xbfone\n\n  \r\ntwo\nthree"
    lines = list(read_lines(io.BytesIO(data)))
    assert [(line.number, line.data) for line in lines] == [(1, b"\xef\xbb\xbfone\n"), (4, b"two\n"), (5, b"three")]
    assert all(data[line.offset :].startswith(line.data) for line in lines)


def test_of_a_line_without_end_only_its_beginning_is_held(monkeypatch):
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 10)
    lines = list(read_lines(io.BytesIO(b"x" * 35 + b"\nshort\n" + b"y" * 10 + b"\n" + b"z" * 11)))
    assert [(line.number, line.offset, len(line.data)) for line in lines] == [
        (1, 0, 11), (2, 36, 6), (3, 42, 11), (4, 53, 11)
    ]  # fmt: skip
    assert fault(lines[0].data).code == "line_too_long"


def record(custom_id, text="x"):
    return new_record(custom_id, response=BatchResponse(200, "req", msgspec.Raw(json.dumps({"t": text}).encode())))


def ids(path):
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("torn", ["", "{", '{"id":"batch_req_1","custom_id":"c"', "x" * 3_000_000])
def test_a_torn_last_line_is_cut_off(tmp_path, torn):
    path = tmp_path / "out.jsonl"
    output = OutputFile(str(path))
    output.append(record("a"))
    output.append(record("b"))
    output.close()
    path.write_text(path.read_text() + torn)
    output = OutputFile(str(path))
    output.repair()
    output.append(record("c"))
    assert ids(path) == ["a", "b", "c"]
    assert [read.custom_id for _, read in output.read_records()] == ["a", "b", "c"]
    output.close()


def test_a_file_of_one_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"id":')
    output = OutputFile(str(path))
    output.repair()
    assert path.read_bytes() == b""
    output.close()


@given(st.permutations(list(range(7))))
def test_sorting_takes_any_order_and_leaves_out_what_is_not_named(tmp_path_factory, order):
    path = tmp_path_factory.mktemp("sort") / "out.jsonl"
    output = OutputFile(str(path))
    spans = {number: output.append(record(str(number), "y" * number)) for number in order}
    output.sort(spans[number] for number in range(6))
    assert ids(path) == [str(number) for number in range(6)]
    output.append(record("last"))
    assert ids(path)[-1] == "last"
    output.close()
    assert [file.name for file in path.parent.iterdir()] == ["out.jsonl"]


def test_two_batches_do_not_write_one_file(tmp_path):
    path = str(tmp_path / "out.jsonl")
    first = OutputFile(path)
    with pytest.raises(ToolError, match="being written by another quire batch"):
        OutputFile(path)
    first.sort([first.append(record("a"))])
    with pytest.raises(ToolError, match="being written by another quire batch"):
        OutputFile(path)
    first.close()
    OutputFile(path).close()


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("buy bread\n")
    output = OutputFile(str(path))
    output.repair()
    with pytest.raises(ToolError, match=r"no output of a batch \(line 1\)"):
        list(output.read_records())
    assert path.read_text() == "buy bread\n"
    output.close()


def test_the_index_gives_an_id_to_its_first_line_and_walks_while_it_changes():
    with BatchIndex() as index:
        for number, custom_id in enumerate(["a", "b", "a", None, None], 1):
            index.add(number, number * 10, custom_id)
        assert (index.find("a"), index.find("b"), index.find("c"), index.num_lines()) == (1, 2, None, 5)
        seen = []
        for line in index.pending():
            seen.append(line.number)
            index.record(line.number, (100 - line.number, 1))
            if line.number == 1:
                index.record(2, (98, 1))
        assert seen == [1, 3, 4, 5]
        assert not index.is_sorted()
        assert [span.offset for span in index.spans()] == [99, 98, 97, 96, 95]


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("7", 7, 7),
        ("0", 0.2, 0.3),
        ("-3", 0.2, 0.3),
        ("99999", 300, 300),
        ("Thu, 01 Jan 1970 00:20:00 GMT", 200, 200),
        ("nan", 1.5, 2.5),
        ("soon", 1.5, 2.5),
        (None, 1.5, 2.5),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_never_at_once(value, least, most):
    assert least <= retry_after_s(value, now_s=1000.0, attempt=2) <= most
