"""When the next daemon loads beside the running one, when instead of it, and when neither is possible."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.interface.config import EngineConfig, LoraSource, PeerConfig, ServerConfig
from engine.interface.errors import StartupError
from engine.interface.fit_report import Ask, Diagnosis, Machine, ModelReport, Room
from server.launcher import takeover_form
from server.launcher.takeover_form import EngineFacts, choose_form, facts_of, why_not_instead

FACTS = EngineFacts(protocol="p", model="m")
MACHINE = Machine(
    torch="2", cuda=None, triton=None, driver=None, flash_attn=None, transformers=None, why_no_cuda=None, gpus=[]
)
ROOM = Room(
    device="GPU",
    total=80,
    usable=40,
    step=1,
    kv_cache=30,
    kv_cache_tokens=9,
    max_model_len=9,
    max_num_seqs=9,
    num_requests={},
)
SERVER = ServerConfig(model="", served_model_names=["x"])
SHORT = "The GPU has 1 GiB free."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    return tmp_path


def facts(folder: Path, **options: object) -> EngineFacts:
    return facts_of(EngineConfig(model=str(folder), **options), SERVER)


def test_equal_models_have_equal_facts_and_others_have_not(folder: Path) -> None:
    first = facts(folder)
    assert first == facts(folder, max_num_seqs=3)
    assert why_not_instead(first, facts(folder)) == ""
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{ }")
        changed = facts(folder)
        assert why_not_instead(first, changed) == "it serves another model"
        first = changed
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(1_500_000)
        file.write(b"1" * 200_000)
    assert facts(folder).model != first.model
    assert facts(folder, load_format="dummy").model != first.model


@pytest.mark.parametrize(
    ("running", "following", "why"),
    [
        (None, FACTS, "keeps its engine to itself"),
        (EngineFacts(), FACTS, "could not be read"),
        (msgspec.structs.replace(FACTS, problem="P"), FACTS, "P"),
        (FACTS, msgspec.structs.replace(FACTS, problem="Q"), "Q"),
        (FACTS, msgspec.structs.replace(FACTS, protocol="other"), "different protocols"),
        (FACTS, msgspec.structs.replace(FACTS, model="other"), "another model"),
        (msgspec.structs.replace(FACTS, loras=["a=1"]), FACTS, "adapters"),
    ],
)
def test_requests_go_on_only_where_they_mean_the_same(
    running: EngineFacts | None, following: EngineFacts, why: str
) -> None:
    assert why in why_not_instead(running, following)


def test_what_keeps_requests_from_going_on_is_named(folder: Path) -> None:
    peer = PeerConfig(role="decode", index=0, num_prefill=1, num_decode=1)
    assert "--disaggregate" in facts(folder, peer=peer).problem
    no_replays = msgspec.structs.replace(SERVER, max_replays=0)
    assert "--max-replays 0" in facts_of(EngineConfig(model=str(folder)), no_replays).problem


def test_adapters_are_those_with_the_same_name_and_content(folder: Path) -> None:
    loras = []
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text("{}")
        (folder / name / "adapter_model.safetensors").write_bytes(bytes(1000))
        loras.append(LoraSource(name, str(folder / name)))
    running = facts(folder, loras=loras[:1])
    assert why_not_instead(running, facts(folder, loras=loras)) == ""  # more adapters behind
    assert "adapters" in why_not_instead(running, facts(folder, loras=loras[::-1]))
    (folder / "elsewhere").mkdir()
    for file in (folder / "a").iterdir():
        (folder / "elsewhere" / file.name).write_bytes(file.read_bytes())
    assert why_not_instead(running, facts(folder, loras=[LoraSource("a", str(folder / "elsewhere"))])) == ""
    assert "adapters" in why_not_instead(running, facts(folder, loras=[LoraSource("c", str(folder / "a"))]))
    (folder / "a" / "adapter_model.safetensors").write_bytes(bytes(999) + b"1")  # trained in its place
    assert "adapters" in why_not_instead(running, facts(folder, loras=loras))
    assert max(map(len, running.loras)) == 32  # an offer of 64 KiB holds many


Asked = Callable[[ModelReport, ModelReport], list[bool]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return a function that sets the replies for the memory as it is now and for all memory."""

    def set_replies(now: ModelReport, alone: ModelReport) -> list[bool]:
        asks: list[bool] = []

        def reply(ask: Ask) -> Diagnosis:
            asks.append(ask.is_alone)
            return Diagnosis(machine=MACHINE, model=alone if ask.is_alone else now)

        monkeypatch.setattr(takeover_form, "ask_engine", reply)
        return asks

    return set_replies


def report(*, problem: str | None = None, alone: int | None = None) -> ModelReport:
    room = None if problem else msgspec.structs.replace(ROOM, kv_cache_alone=alone)
    return ModelReport(architecture="A", problem=problem, room=room)


def choose(folder: Path, wanted: str, running: EngineFacts | None = None) -> tuple[bool, str]:
    engine = EngineConfig(model=str(folder))
    return choose_form(wanted, Ask(folder=str(folder)), running=running or facts(folder), engine=engine, server=SERVER)


@pytest.mark.parametrize(
    ("now", "is_instead", "asks"),
    [
        (report(), False, [False]),  # on a CPU
        (report(alone=60), False, [False]),
        (report(alone=61), True, [False]),  # half a cache for the daemon's whole life
        (report(problem=SHORT), True, [False, True]),
    ],
)
def test_memory_decides(folder: Path, asked: Asked, now: ModelReport, is_instead: bool, asks: list[bool]) -> None:
    seen = asked(now, report())
    assert choose(folder, "auto")[0] is is_instead
    assert seen == asks


def test_a_form_that_is_asked_for_is_checked_before_anything_is_touched(folder: Path, asked: Asked) -> None:
    seen = asked(report(problem=SHORT), report(problem="It has no header."))
    assert choose(folder, "beside") == (False, "asked for")
    assert seen == []
    for wanted in ("instead", "auto"):
        with pytest.raises(StartupError, match=r"It has no header\."):
            choose(folder, wanted)
    with pytest.raises(StartupError, match=r"--takeover-form instead: .* it serves another model"):
        choose(folder, "instead", facts_with(facts(folder), model="other"))


def facts_with(given: EngineFacts, **changes: str) -> EngineFacts:
    return msgspec.structs.replace(given, **changes)


def test_neither_form_is_possible(folder: Path, asked: Asked) -> None:
    asked(report(problem=SHORT), report())
    with pytest.raises(StartupError, match=r"1 GiB free\. It cannot be loaded in .*: it serves another model\. Stop"):
        choose(folder, "auto", facts_with(facts(folder), model="other"))
    asked(report(alone=100), report())
    assert choose(folder, "auto", facts_with(facts(folder), model="other"))[0] is False  # a small cache is better
    assert choose(folder, "auto")[0] is True


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, folder: Path, asked: Asked) -> None:
    asked(report(), report())
    (folder / "more.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StartupError, match="The model's files cannot be read"):
        choose(folder, "auto", FACTS)
