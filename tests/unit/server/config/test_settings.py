"""Settings from command line, environment and file: who wins, what is refused and how, what --show-config prints."""

import argparse
import ssl
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface.errors import StartupError
from server.cli import main, serve_parser
from server.config.serve_flags import Tls, tls_of
from server.config.settings import SettingsParser, places_of
from server.config.settings_file import show_config

# a value of each kind that is not the default, as text
VALUES = {
    "port": "81",
    "kv-cache-memory": "2GiB",
    "kv-host-memory": "32GiB",
    "kv-disk-size": "1TiB",
    "gpu-memory-utilization": "0.5",
    "device": "cpu",
    "reject-unknown-fields": "true",
    "overlap": "true",
    "no-prefix-caching": "yes",
    "root-path": "/llm",
    "http-workers": "3",
    "drain-timeout": "3s",
    "model": "./my model",
    "revision": "1.0",
}


def parse(*arguments: str, **environment: str) -> argparse.Namespace:
    return serve_parser(environment).parse_args(list(arguments))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, **environment: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse(*arguments, **environment)
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert error.count("\n") == 1
    return error


@pytest.fixture
def file(tmp_path: Path):
    """Return a function that writes a file of settings and returns its path."""

    def write(text: str) -> str:
        (tmp_path / "quire.yaml").write_text(text, encoding="utf-8")
        return str(tmp_path / "quire.yaml")

    return write


@pytest.mark.parametrize(("key", "text"), VALUES.items())
def test_a_value_means_the_same_in_all_three_places(key: str, text: str, file) -> None:
    dest, flag = key.replace("-", "_"), [f"--{key}={text}"]
    if text in ("true", "yes"):
        flag = [f"--{key}"]
    elif key == "model":
        flag = [text]
    by_flag, by_default = parse(*flag), parse()
    by_variable = parse(**{f"QUIRE_{dest.upper()}": text})
    path = file(f"{key}: {text}\n")
    by_file = parse("--config", path)
    assert vars(by_flag)[dest] == vars(by_variable)[dest] == vars(by_file)[dest] != vars(by_default)[dest]
    assert by_flag.origins[dest] == "command line"
    assert by_variable.origins[dest] == f"QUIRE_{dest.upper()}"
    assert by_file.origins[dest] == f"{path}:1"
    assert by_default.origins[dest] == "default"


def test_command_line_before_environment_before_file_before_default(file) -> None:
    path = file(
        "port: 1\nmax-queued-requests: 2\nblock-size: 3\nreject-unknown-fields: true\nno-prefix-caching: true\n"
    )
    found = parse(
        *("--port", "7", "--prefix-caching"),
        QUIRE_CONFIG=path,
        QUIRE_PORT="8",
        QUIRE_MAX_QUEUED_REQUESTS="9",
        QUIRE_REJECT_UNKNOWN_FIELDS="off",
    )
    assert (found.port, found.max_queued_requests, found.block_size, found.overlap) == (7, 9, 3, None)
    assert (found.reject_unknown_fields, found.no_prefix_caching) == (False, False)
    assert parse("--no-reject-unknown-fields", "--config", path).reject_unknown_fields is False
    assert parse("--config", path).reject_unknown_fields is True


def test_the_file_of_the_command_line_comes_before_that_of_the_environment(file) -> None:
    path = file("port: 1\n")
    assert parse("--config", path, QUIRE_CONFIG="/no/such/file").port == 1


def test_a_repeatable_flag_is_a_list_in_a_file_and_has_commas_in_a_variable_and_is_replaced_not_added_to(file) -> None:
    path = file("served-model-name: [a, b]\ncors-origin: https://a.test\nlora:\n  - sql=./sql\n  - poems=./poems\n")
    found = parse("--config", path)
    assert found.served_model_name == ["a", "b"]
    assert found.cors_origin == ["https://a.test"]
    assert found.lora == [("sql", "./sql"), ("poems", "./poems")]
    assert parse("--config", path, QUIRE_SERVED_MODEL_NAME="c, d").served_model_name == ["c", "d"]
    assert parse("--served-model-name", "e", "--config", path, QUIRE_SERVED_MODEL_NAME="c").served_model_name == ["e"]
    assert parse("--lora", "x=y").lora == [("x", "y")]
    assert parse().lora == []  # one namespace's list is not the next one's


def test_null_and_an_empty_variable_say_nothing(file) -> None:
    found = parse("--config", file("port:\nhost: null\n"), QUIRE_MAX_QUEUED_REQUESTS=" ", QUIRE_STRICT="")
    assert (found.port, found.host, found.max_queued_requests) == (None, None, 2048)
    assert found.reject_unknown_fields is False
    assert set(found.origins.values()) == {"default"}
    assert parse("--config", file("# nothing\n")).port is None


@pytest.mark.parametrize(
    ("key", "text"),
    [("port", "http"), ("device", "tpu"), ("drain-timeout", "-1"), ("lora", "no-folder"), ("host", "' '")],
)
def test_a_wrong_value_gets_the_flags_sentence_with_the_name_of_its_place(
    key: str, text: str, file, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, f"--{key}={text.strip(chr(39))}")
    variable = f"QUIRE_{key.replace('-', '_').upper()}"
    path = file(f"debug: false\n{key}: {text}\n")
    of_file = refusal(capsys, "--config", path)
    assert of_file == said.replace(f"--{key}: ", f"{path}:2: {key}: ")
    assert of_file == refusal(
        capsys, "--config", path, f"--{key}=1" if key == "port" else "--enforce-eager"
    )  # overruled too
    if text.strip("' "):
        assert refusal(capsys, **{variable: text}) == said.replace(f"--{key}: ", f"{variable}: ")


def test_a_wrong_item_of_a_list_is_named_by_its_own_line(file, capsys: pytest.CaptureFixture[str]) -> None:
    path = file("cors-origin:\n  - https://a.test\n  - nonsense\n")
    assert f"{path}:3: cors-origin: 'nonsense' is not an origin" in refusal(capsys, "--config", path)


# rule: Security: No key in a file of settings
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_model_len: 4\n", ":1: max_model_len is no setting of this server: max-model-len is the nearest"),
        ("port: 1\nfrobnicate: 2\n", ":2: frobnicate is no setting of this server (see"),
        ("config: other.yaml\n", ":1: config is no setting of this server"),
        ("port: 1\nreject-unknown-fields: true\nport: 1\n", ":3: port is given twice, also in line 1"),
        ("port: [1, 2]\n", ":1: port takes one value, not a list"),
        ("port: {a: 1}\n", ":1: port takes plain values"),
        ("lora: [null]\n", ":1: lora takes plain values"),
        ("host: !!python/object:os.system a\n", ":1: host has the tag tag:yaml.org,2002:python/object:os.system"),
        ("host: !secret a\n", ":1: host has the tag !secret"),
        ('host: "a\\0b"\n', ":1: host has a character that cannot be printed"),
        ("reject-unknown-fields: maybe\n", ":1: reject-unknown-fields: 'maybe' is not true or false"),
        ("api-key: sk-1\n", ":1: api-key is a secret: write the keys in a file of their own, named by api-key-file"),
        ("- port\n", ":1: a file of settings has lines such as port: 8000"),
        ("port: 1\n  host: a\n", ":2: this is no YAML: "),
        ("a: 1\n---\nb: 2\n", ": this is no YAML: "),
        ("\x01", "this is no YAML: "),
        ("[" * 5000, "is nested too deeply"),
        ("#" * (1 << 20) + "#", "has more than 1048576 bytes"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(text: str, words: str, file, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "--config", file(text))
    assert words in error
    assert "sk-1" not in error


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config /no/such.yaml cannot be read: No such file" in refusal(capsys, QUIRE_CONFIG="/no/such.yaml")
    (tmp_path / "latin").write_bytes(b"host: \xff\n")
    assert "not UTF-8 text" in refusal(capsys, "--config", str(tmp_path / "latin"))


def test_an_unknown_variable_is_refused_and_the_nearest_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "QUIRE_PROT is no setting of this server: QUIRE_PORT is the nearest" in refusal(capsys, QUIRE_PROT="1")
    assert "QUIRE_CONFG is no setting of this server: QUIRE_CONFIG is" in refusal(capsys, QUIRE_CONFG="")
    assert "QUIRE_SHOW_CONFIG is no setting" in refusal(capsys, QUIRE_SHOW_CONFIG="1")


def test_the_variables_that_kubernetes_adds_for_a_service_called_quire_are_no_settings() -> None:
    found = parse(
        QUIRE_SERVICE_HOST="10.0.0.1",
        QUIRE_SERVICE_PORT="8000",
        QUIRE_SERVICE_PORT_HTTP="8000",
        QUIRE_PORT="tcp://10.0.0.1:8000",
        QUIRE_PORT_8000_TCP="tcp://10.0.0.1:8000",
        QUIRE_PORT_8000_TCP_ADDR="10.0.0.1",
        QUIRE_PORT_8000_TCP_PROTO="tcp",
        QUIRE_GPU_PORT="tcp://10.0.0.1:8000",
        QUIRE_GPU_SERVICE_HOST="10.0.0.1",
    )
    assert set(found.origins.values()) == {"default"}


def test_tls_is_both_files_or_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, key, tried = tmp_path / "chain.pem", tmp_path / "key.pem", []
    chain.touch()
    key.touch()

    def load_cert_chain(_: object, *files: object, **__: object) -> None:
        tried.append(files)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_cert_chain)
    assert tls_of(argparse.Namespace(tls_cert=None, tls_key=None)) is None
    tls = tls_of(argparse.Namespace(tls_cert=str(chain), tls_key=str(key)))
    assert tls == Tls(str(chain), str(key))
    assert tried == [tuple(tls)]
    assert get_type_hints(Tls) == {"cert": str, "key": str}
    with pytest.raises(StartupError, match="--tls-key needs --tls-cert as well"):
        tls_of(argparse.Namespace(tls_cert=None, tls_key=str(key)))


def test_a_fault_found_later_tells_where_its_flags_come_from(
    file, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file("tls-cert: /no/cert.pem\ntls-key: /no/key.pem\n")
    assert main(["serve", "--config", path]) == 2
    error = capsys.readouterr().err
    assert f"--tls-cert /no/cert.pem cannot be read: No such file or directory. (--tls-cert is from {path}:1)" in error
    monkeypatch.setenv("QUIRE_UDS", "/tmp/x")
    assert main(["serve", "--port", "1"]) == 2
    assert "(--uds is from QUIRE_UDS)" in capsys.readouterr().err
    assert places_of("--port 1 is in use", parse("--port", "1")) == ""


def test_show_config_prints_every_value_with_its_place_and_no_key(
    file, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file("port: 90\notlp-traces-endpoint: http://me:hush@collector:4318\n")
    monkeypatch.setenv("QUIRE_API_KEY", "sk-one,sk-two")
    monkeypatch.setenv("QUIRE_DEVICE", "cpu")
    assert main(["serve", "--config", path, "--show-config", "--api-key", "sk-three", "--max-model-len", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["port:", "90", "#", f"{path}:1"] for line in lines)
    assert any(line.split() == ["device:", "cpu", "#", "QUIRE_DEVICE"] for line in lines)
    assert any(line.split() == ["max-model-len:", "64", "#", "command", "line"] for line in lines)
    assert any(line.split() == ["host:", "null", "#", "default:", "127.0.0.1"] for line in lines)
    assert "# api-key: 1 from command line, 2 from QUIRE_API_KEY; never shown" in lines
    assert not any(key in "".join(lines) for key in ("sk-one", "sk-two", "sk-three"))
    assert "hush" not in "".join(lines)
    shown = [line.partition(":")[0] for line in lines if not line.startswith("#")]
    assert sorted([*shown, "api-key"]) == sorted(setting.key for setting in serve_parser({}).settings)


TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)


@given(
    port=st.integers(0, 65_535),
    share=st.floats(0.001, 1.0),
    names=st.lists(TEXTS, min_size=1, max_size=3),
    is_strict=st.booleans(),
    template=TEXTS,
)
def test_what_show_config_prints_is_a_file_that_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, port: int, share: float, names: list[str], is_strict: bool, template: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "shown.yaml"
    arguments = [f"--port={port}", f"--gpu-memory-utilization={share!r}", f"--chat-template={template}"]
    arguments += [f"--served-model-name={name}" for name in names]
    parser = serve_parser({})
    first = parser.parse_args([*arguments, f"--{'' if is_strict else 'no-'}reject-unknown-fields", "--api-key", "k"])
    path.write_text(show_config(parser.settings, first, environment={}), encoding="utf-8")
    second = serve_parser({}).parse_args(["--config", str(path)])
    dests = ("port", "gpu_memory_utilization", "served_model_name", "reject_unknown_fields", "chat_template", "lora")
    for dest in (*dests, "root_path"):
        assert vars(first)[dest] == vars(second)[dest]


# old flag, variable, key and value; the new setting and the value it gets
OLD_NAMES = [
    ("max-waiting", "9", "max-queued-requests", 9),
    ("max-num-mixed-tokens", "64", "max-decode-step-tokens", 64),
    ("depth", "1", "overlap", False),
    ("depth", "2", "overlap", True),
    ("strict", "true", "reject-unknown-fields", True),
]


@pytest.mark.parametrize(("old", "text", "new", "value"), OLD_NAMES)
def test_an_old_name_works_in_all_three_places_and_is_shown_as_the_new_one(
    old: str, text: str, new: str, value: object, file
) -> None:
    dest, variable = new.replace("-", "_"), f"QUIRE_{old.replace('-', '_').upper()}"
    path = file(f"{old}: {text}\n")
    by_flag = parse(f"--{old}" if text == "true" else f"--{old}={text}")
    by_variable, by_file = parse(**{variable: text}), parse("--config", path)
    assert vars(by_flag)[dest] == vars(by_variable)[dest] == vars(by_file)[dest] == value
    origins = [found.origins[dest] for found in (by_flag, by_variable, by_file)]
    assert origins == ["command line", variable, f"{path}:1"]
    shown = show_config(serve_parser({}).settings, by_file, environment={})
    assert f"{new}: {str(value).lower()}" in shown
    assert f"\n{old}:" not in shown


def test_the_last_of_an_old_and_a_new_flag_wins() -> None:
    assert parse("--max-waiting=1", "--max-queued-requests=2").max_queued_requests == 2
    assert parse("--max-queued-requests=2", "--max-waiting=1").max_queued_requests == 1
    assert parse("--overlap", "--depth=1").overlap is False
    assert parse("--depth=2", "--no-overlap").overlap is False
    assert parse("--strict", "--no-reject-unknown-fields").reject_unknown_fields is False
    assert parse("--reject-unknown-fields", "--no-strict").reject_unknown_fields is False
    assert parse("--max-queued-requests=2", QUIRE_MAX_WAITING="1").max_queued_requests == 2


def test_an_old_and_a_new_name_in_one_place_are_refused(file, capsys: pytest.CaptureFixture[str]) -> None:
    both = {"QUIRE_DEPTH": "1", "QUIRE_OVERLAP": "true"}
    assert "QUIRE_DEPTH is the old name of QUIRE_OVERLAP: give one of them" in refusal(capsys, **both)
    path = file("max-waiting: 1\nmax-queued-requests: 1\n")
    words = "max-waiting is the old name of max-queued-requests: give one of them"
    assert words in refusal(capsys, "--config", path)
    stronger = parse("--config", file("max-waiting: 1\n"), QUIRE_MAX_QUEUED_REQUESTS="2")
    assert stronger.max_queued_requests == 2


def test_a_wrong_value_of_an_old_name_gets_the_old_name(file, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--depth: '3' is not a whole number from 1 to 2" in refusal(capsys, "--depth=3")
    assert "QUIRE_DEPTH: '3' is not a whole number from 1 to 2" in refusal(capsys, QUIRE_DEPTH="3")
    path = file("strict: maybe\n")
    assert f"{path}:1: strict: 'maybe' is not true or false" in refusal(capsys, "--config", path)


@pytest.mark.parametrize("command", ["serve", "bench offline", "bench steps", "bench plan"])
def test_help_shows_new_names_only(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help-all"])
    shown = capsys.readouterr().out
    assert "--overlap" in shown or "--max-decode-step-tokens" in shown
    assert not [old for old, *_ in OLD_NAMES if f"--{old} " in shown]


def test_other_commands_have_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ANYTHING", "x")
    parser = SettingsParser(prog="quire")
    parser.add_argument("--port")
    assert vars(parser.parse_args([])) == {"port": None}
