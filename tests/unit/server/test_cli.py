"""Flags: every value checked in one sentence, every default as documented, help without heavy imports."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.interface.config import EngineConfig, LaunchConfig, LoraSource, ServerConfig, SpeculativeConfig
from engine.interface.errors import StartupError
from engine.interface.fit_report import Ask
from server.cli import main
from server.commands.child_server import served_name_flags
from server.config.value_types import size
from server.launcher import launch, listener, takeover, takeover_form
from server.launcher.takeover import Offer
from server.launcher.takeover_form import EngineFacts, Form

ROOT = Path(__file__).parents[3]


class Launched(NamedTuple):
    launch: LaunchConfig
    engine: EngineConfig
    server: ServerConfig


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Catch what `serve` would launch."""
    calls: list[Launched] = []

    def fake_launch(
        launch: LaunchConfig, engine: EngineConfig, server: ServerConfig, listeners: object, *, takeover: object
    ) -> int:
        calls.append(Launched(launch, engine, server))
        return 0

    monkeypatch.setattr(launch, "launch", fake_launch)
    monkeypatch.setattr(listener, "bind", lambda config: [])
    return calls


def test_names_from_a_file_are_served_whatever_they_look_like(launched: list[Launched]) -> None:
    names = ["--debug", "a b", "-p", "größe", "x" * 512]
    unfit = ["", " ", "a\0b", "x" * 513, "\ud800"]
    assert main(["serve", *served_name_flags([*unfit, *names])]) == 0
    assert launched[0].server.served_model_names == names


# rule: Security: The address is loopback unless asked otherwise
def test_serve_without_flags_has_the_documented_defaults(launched: list[Launched]) -> None:
    assert main(["serve"]) == 0
    (config,) = launched
    assert config.launch == LaunchConfig()
    assert config.engine == EngineConfig(model=config.engine.model, chooses_host_memory=True)
    assert config.server == ServerConfig(model=config.engine.model, served_model_names=["quire-demo"], allowed_hosts=[])
    assert config.engine.model.endswith("models/demo/checkpoint")


def test_every_flag_reaches_its_configuration(launched: list[Launched], tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    keys = tmp_path / "keys"
    keys.write_text("of-the-file\nk\n")
    flags = (
        "--host 0.0.0.0 --port 81 --http-workers 3 --served-model-name a --served-model-name b --device cpu "
        "--tensor-parallel-size 2 --expert-parallel "
        "--dtype float32 --load-format dummy --max-model-len 64 --max-num-seqs 4 --max-num-batched-tokens 32 "
        "--block-size 8 --kv-cache-memory 1.5MiB --gpu-memory-utilization 0.5 --attention-backend torch "
        "--kv-host-memory 2GiB --kv-disk /kv --kv-disk-size 1TiB "
        '--kv-events-config {"publisher":"null"} '
        f"--no-prefix-caching --no-overlap --max-queued-requests 9 --max-decode-step-tokens 16 "
        f"--max-queued-tokens 99 --chat-template {template} "
        "--speculative ngram --num-speculative-tokens 7 --ngram-min 3 "
        "--reject-unknown-fields --drain-timeout 3s --request-timeout 60 --log-format json --log-level warning --debug "
        f"--lora sql={tmp_path} --lora poems={tmp_path}/. --kv-cache-dtype fp8 "
        "--quantization fp8 --api-key k --cors-origin https://a.test --cors-origin * --root-path /llm "
        f"--api-key-file {keys} --stall-timeout 60 --priority keys"
    )
    assert main(["serve", *flags.split()]) == 0
    (config,) = launched
    assert config.launch == LaunchConfig(
        host="0.0.0.0",
        port=81,
        http_workers=3,
        drain_timeout_s=3.0,
        log_format="json",
        log_level="warning",
        debug=True,
        stall_timeout_s=60.0,
        api_key_file=str(keys),
        given_key_hashes=[sha256(b"k").hexdigest()],
        notices=config.launch.notices,
    )
    in_ps, readable = config.launch.notices
    assert "ps" in in_ps
    assert readable == f"--api-key-file {keys}: other users of this machine can read the keys; chmod o-r {keys}"
    assert config.engine == EngineConfig(
        model=config.engine.model,
        load_format="dummy",
        device="cpu",
        tensor_parallel_size=2,
        is_expert_parallel=True,
        dtype="float32",
        quantization="fp8",
        loras=[LoraSource("sql", str(tmp_path)), LoraSource("poems", str(tmp_path))],
        attention_backend="torch",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_decode_step_tokens=16,
        block_size=8,
        kv_cache_memory_bytes=1_572_864,
        kv_host_memory_bytes=2**31,
        kv_disk="/kv",
        kv_disk_bytes=2**40,
        kv_cache_dtype="fp8",
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        overlap_depth=1,
        max_queued_requests=9,
        max_queued_tokens=99,
        speculative=SpeculativeConfig(method="ngram", num_tokens=7, ngram_min=3, ngram_max=4),
    )
    assert config.server == ServerConfig(
        model=config.engine.model,
        served_model_names=["a", "b"],
        lora_names=["sql", "poems"],
        chat_template=str(template),
        strict=True,
        request_timeout_s=60.0,
        api_key_hashes=[sha256(b"k").hexdigest(), sha256(b"of-the-file").hexdigest()],
        api_key_roles={sha256(key).hexdigest(): ["inference", "metrics", "admin"] for key in (b"k", b"of-the-file")},
        cors_origins=["https://a.test", "*"],
        priority="keys",
        root_path="/llm",
    )


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ("", []), ("--host localhost", []), ("--host ::1", []), ("--host 127.3.2.1 --allowed-host A.test", ["a.test"]),
        ("--allowed-host *", None), ("--api-key k", None), ("--api-key k --host 0.0.0.0", None),
        ("--host 0.0.0.0 --allow-anonymous", None), ("--host 0.0.0.0 --allow-anonymous --allowed-host q", ["q"]),
        ("--uds /tmp/never-bound.sock", None),
    ],
)  # fmt: skip
def test_host_names_are_checked_where_only_a_browser_could_let_others_in(
    launched: list[Launched], flags: str, hosts: list[str] | None
) -> None:
    assert main(["serve", *flags.split()]) == 0
    assert launched[0].server.allowed_hosts == hosts


# rule: Security: An address that other machines reach needs a key, or --allow-anonymous
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_for_other_machines_needs_a_key(
    launched: list[Launched], host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--host", host]) == 2
    assert f"--host {host} can be reached by other machines and there is no API key" in capsys.readouterr().err
    assert launched == []


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--allowed-host", "http://a.test"),
        ("--allowed-host", "a.test:80"),
        ("--allowed-host", ""),
        ("--priority", "some"),
        ("--port", "65536"),
        ("--port", "-1"),
        ("--port", "http"),
        ("--http-workers", "0"),
        ("--device", "tpu"),
        ("--dtype", "int3"),
        ("--load-format", "pickle"),
        ("--quantization", "int3"),
        ("--max-model-len", "0"),
        ("--max-num-seqs", "1.5"),
        ("--max-num-batched-tokens", "many"),
        ("--block-size", "0"),
        ("--kv-cache-memory", "4 parsecs"),
        ("--kv-cache-dtype", "int4"),
        ("--kv-cache-memory", "0"),
        ("--kv-cache-memory", "9" * 400),
        ("--kv-host-memory", "0"),
        ("--kv-host-memory", "on"),
        ("--kv-disk", " "),
        ("--kv-disk-size", "10X"),
        ("--kv-disk-size", "off"),
        ("--kv-events-config", "on"),
        ("--kv-events-config", '{"enable":true}'),
        ("--kv-events-config", '{"publisher":"nats"}'),
        ("--kv-events-config", '{"hwm":0}'),
        ("--gpu-memory-utilization", "1.01"),
        ("--gpu-memory-utilization", "0"),
        ("--gpu-memory-utilization", "nan"),
        ("--depth", "3"),
        ("--speculative", "medusa"),
        ("--num-speculative-tokens", "0"),
        ("--ngram-min", "33"),
        ("--max-queued-requests", "0"),
        ("--max-waiting", "0"),
        ("--max-num-mixed-tokens", "0"),
        ("--drain-timeout", "-1"),
        ("--request-timeout", "inf"),
        ("--request-timeout", "0"),
        ("--served-model-name", " "),
        ("--lora", "folder-without-name"),
        ("--lora", "=folder"),
        ("--lora", "name="),
        ("--log-format", "xml"),
        ("--log-level", "loud"),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_flag_and_value(
    flag: str, value: str, launched: list[Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", f"{flag}={value}"])
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert error.count("\n") == 1
    assert flag in error
    assert value.strip() in error
    assert launched == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "4"], "--max-num-batched-tokens 4"),
        (["--chat-template", "/no/such.jinja"], "--chat-template /no/such.jinja cannot be read"),
        (["--revision", "main"], "--revision main needs a hub id"),
        (["--num-speculative-tokens", "3"], "--num-speculative-tokens 3 needs --speculative ngram"),
        (["--ngram-max", "5"], "--ngram-max 5 needs --speculative ngram"),
        (["--expert-parallel"], "--expert-parallel needs --tensor-parallel-size 2 or more, and it is 1"),
        (
            ["--speculative", "ngram", "--ngram-min", "5", "--ngram-max", "3"],
            "--ngram-max 3 is less than --ngram-min",
        ),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_flags_that_do_not_fit_together_are_wrong_usage(
    arguments: list[str], words: str, launched: list[Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ")
    assert error.count("\n") == 1
    assert words in error
    assert launched == []


class Offered:
    """A port that a running daemon offers."""

    listeners: tuple[()] = ()
    offer = Offer(7, "0", 0, engine=EngineFacts("p", "m"))
    form: Form | None = None
    is_done = False
    untouched = "The daemon with process 7 goes on serving."


def test_a_takeover_asks_before_anything_slow_and_says_who_serves_if_it_fails(
    monkeypatch: pytest.MonkeyPatch, launched: list[Launched], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[int] = []
    wants: list[str] = []

    def request(config: LaunchConfig) -> Offered:
        asked.append(config.port)
        return Offered()

    def choose(wanted: str, ask: Ask, *, running: EngineFacts, engine: EngineConfig, server: ServerConfig) -> Form:
        wants.append(wanted)
        assert (ask.folder, running.model) == (engine.model, "m")
        return Form(wanted == "instead", "asked for")

    monkeypatch.setattr(takeover, "request_takeover", request)
    monkeypatch.setattr(takeover_form, "choose_form", choose)
    monkeypatch.setattr(listener, "bind", lambda config: pytest.fail("the port is the running daemon's"))
    assert main(["serve", "--port", "8123", "--takeover"]) == 0
    assert (asked, len(launched), wants) == ([8123], 1, ["auto"])
    assert main(["serve", str(tmp_path), "--takeover"]) in (2, 3)
    assert capsys.readouterr().err.endswith("The daemon with process 7 goes on serving.\n")
    assert main(["serve", "--max-num-batched-tokens", "1", "--max-num-seqs", "2", "--takeover"]) == 2
    assert (asked, len(launched)) == ([8123, 8000], 1)
    assert main(["serve", "--takeover", "--takeover-form", "instead"]) == 0
    assert (len(launched), wants[-1]) == (2, "instead")


def test_an_internal_error_shows_its_traceback_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, launched: list[Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: LaunchConfig) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(listener, "bind", broken)
    assert main(["serve"]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "oops" in error
    with pytest.raises(ZeroDivisionError):
        main(["serve", "--debug"])


@pytest.mark.parametrize("arguments", [("serve", "--show-config"), ("doctor",)])
@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error(arguments: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "server", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 * 2**30), ("512MB", 512 * 10**6), ("512mb", 512 * 10**6), ("4096", 4096), ("1.5 kib", 1536)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


def test_a_port_that_is_taken_is_a_failed_start_that_names_the_flag() -> None:
    (taken,) = listener.bind(LaunchConfig(port=0))
    with taken:
        port = taken.getsockname()[1]
        for http_workers in (1, 2):
            with pytest.raises(StartupError, match=f"Port {port} on 127.0.0.1 is in use.*--port") as caught:
                listener.bind(LaunchConfig(port=port, http_workers=http_workers))
            assert caught.value.exit_code == 3


def test_workers_share_one_port_that_nobody_else_gets() -> None:
    listeners = listener.bind(LaunchConfig(port=0, http_workers=2))
    ports = {one.getsockname()[1] for one in listeners}
    assert len(ports) == 1
    with pytest.raises(StartupError, match="is in use"):
        listener.bind(LaunchConfig(port=ports.pop(), http_workers=2))
    for one in listeners:
        one.close()


@pytest.mark.parametrize(("host", "code"), [("no.such.host.invalid", 2), ("203.0.113.1", 3)])
def test_a_host_that_cannot_be_listened_on_is_named(host: str, code: int) -> None:
    with pytest.raises(StartupError, match=host) as caught:
        listener.bind(LaunchConfig(host=host, port=0))
    assert caught.value.exit_code == code


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["serve", "--help-all"], ["bench", "serve", "--help"], ["--version"]]
)
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "server", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 0
    assert "quire" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert imported.isdisjoint({"torch", "transformers", "fastapi", "rich", "asyncio", "msgspec", "huggingface_hub"})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora", "a=.", "--lora", "a=/tmp"], "--lora a is given twice"),
        (["--lora", "quire-demo=."], "the name of the model itself"),
        (["--served-model-name", "x", "--served-model-name", "y", "--lora", "y=."], "--lora y"),
        (["--lora", "a=/no/such/folder"], "/no/such/folder does not exist"),
        (["--lora", f"a={__file__}"], "is a file"),
        (["--lora", "a=" + "x" * 5000], "--lora a"),
    ],
)
def test_an_adapter_that_cannot_be_is_wrong_usage(
    flags: list[str], words: str, launched: list[Launched], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not launched
