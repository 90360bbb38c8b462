"""The closing panel of a start: once, with the address and what the engine told, and not while a drain runs."""

import asyncio

import pytest

from engine.interface.config import LaunchConfig, ServerConfig
from engine.interface.control import Stage
from server.launcher import startup_banner
from server.launcher.console import Summary


class RecordingConsole:
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.summaries: list[Summary] = []

    def stage(self, stage: Stage) -> None:
        self.stages.append(stage.name)

    def ready(self, summary: Summary) -> None:
        self.summaries.append(summary)


@pytest.fixture
def console() -> RecordingConsole:
    return RecordingConsole()


@pytest.fixture
def banner(console, tmp_path):
    server = ServerConfig(model=str(tmp_path), served_model_names=["tiny"], api_key_hashes=["a", "b"])
    return startup_banner.StartupBanner(LaunchConfig(), server, [], console)


def test_the_panel_is_shown_once(banner, console):
    async def start() -> None:
        banner.begin(Stage("process"))
        for _ in range(2):
            await banner.make(is_draining=lambda: False)

    asyncio.run(start())
    (summary,) = console.summaries
    assert (summary.model_name, summary.num_keys) == ("tiny", 2)
    assert summary.url == banner.url == "(the address of its host)"


def test_stages_after_the_panel_are_not_shown(banner, console):
    async def start() -> None:
        banner.begin(Stage("process"))
        banner.stage(Stage("weights"))
        await banner.make(is_draining=lambda: False)
        banner.stage(Stage("weights"))

    asyncio.run(start())
    assert console.stages == ["process", "weights"]


def test_a_drain_during_the_start_shows_no_panel(banner, console):
    asyncio.run(banner.make(is_draining=lambda: True))
    assert console.summaries == []
    assert not banner.is_made
