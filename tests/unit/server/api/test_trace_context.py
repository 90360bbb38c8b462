"""traceparent in, traceresponse out: what W3C Trace Context §3.2 says of good and bad headers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.request_record import trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_clients_span_is_the_parent_and_the_answer_names_ours():
    context = trace_context([(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()), (b"tracestate", b"a=1"), (b"x", b"y")])
    assert (context.trace_id, context.parent_id, context.is_sampled) == (TRACE, SPAN, True)
    assert context.tracestate == "a=1"
    assert context.span_id != SPAN
    assert context.traceresponse == f"00-{TRACE}-{context.span_id}-01"


def test_a_client_that_does_not_sample_is_followed():
    context = trace_context([(b"traceparent", f"00-{TRACE}-{SPAN}-00".encode())])
    assert not context.is_sampled
    assert context.traceresponse.endswith("-00")


def test_a_later_version_may_have_more_fields():
    assert trace_context([(b"traceparent", f"cc-{TRACE}-{SPAN}-01-what".encode())]).trace_id == TRACE
    assert trace_context([(b"traceparent", f"cc-{TRACE}-{SPAN}-01what".encode())]).trace_id != TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[1:]}-{SPAN}-01",
    ],
)
def test_what_is_not_valid_begins_a_trace_of_its_own(header):
    context = trace_context([(b"traceparent", header.encode())])
    assert context.parent_id == ""
    assert context.is_sampled
    assert context.trace_id != TRACE


def test_two_parents_are_none():
    value = f"00-{TRACE}-{SPAN}-01".encode()
    assert trace_context([(b"traceparent", value), (b"traceparent", value)]).parent_id == ""


def with_state(*values):
    headers = [(b"tracestate", value.encode("latin-1")) for value in values]
    return trace_context([(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()), *headers])


@pytest.mark.parametrize("value", ["a=1", "1t@v=x y", "a=1, b=2,\t,c/*-_9=!~", "k=" + "v" * 256, ""])
def test_a_state_is_kept_as_it_came(value):
    assert with_state(value).tracestate == value
    assert with_state("first=1", value).tracestate == f"first=1,{value}"


@pytest.mark.parametrize(
    "value",
    [
        "secret", "a=1,secret", "A=1", "1=1", "a=", "a=b=c", "a=\xe9", "a=1\n", "a=1,a=2", "@v=1", "a@=1",
        "k=" + "v" * 257, ",".join(f"k{i}=1" for i in range(33)), "a=1" + "," * 510,
    ],
)  # fmt: skip
def test_a_state_that_is_not_valid_is_dropped_and_the_parent_stays(value):
    context = with_state(value)
    assert (context.tracestate, context.parent_id) == ("", SPAN)


@given(st.lists(st.tuples(st.sampled_from([b"traceparent", b"tracestate"]), st.binary(max_size=80)), max_size=3))
def test_whatever_comes_the_answer_has_a_valid_context(headers):
    context = trace_context(headers)
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", context.traceresponse)
    assert int(context.trace_id, 16)
    assert int(context.span_id, 16)
