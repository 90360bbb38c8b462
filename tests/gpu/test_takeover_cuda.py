"""A takeover on one GPU, whose memory does not hold two daemons: the next one loads in the running one's place."""

from pathlib import Path

import pytest

from benchmarks.online import write_model_folder
from tests.support.daemon import READY, ROOT, Daemon, wait_for
from tests.support.life_cycle import Stream, ready_status

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in the shape of Qwen3-0.6B, for random weights."""
    path = tmp_path_factory.mktemp("model")
    write_model_folder(ROOT / "benchmarks" / "shapes" / "qwen3-0.6b" / "config.json", path)
    (path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return path


def test_streams_go_on_in_the_next_daemon_whose_model_has_no_room_beside(folder: Path, tmp_path: Path) -> None:
    flags = (str(folder), "--load-format", "dummy", "--served-model-name", "quire-demo", "--max-model-len", "32768")
    with Daemon(*flags, folder=tmp_path) as old:
        old.wait_ready()
        # longer than the next daemon takes to come that far
        streams = [Stream(old, max_tokens=25_000).wait_started() for _ in range(4)]
        port = old.base_url.rpartition(":")[2]
        with Daemon(*flags, "--port", port, "--takeover", folder=tmp_path) as new:
            wait_for(lambda: READY.search(new.log) or new.process.poll() is not None, timeout_s=240, what="ready")
            assert new.process.poll() is None, new.log
            assert "form=instead reason='memory does not hold both'" in new.log
            for stream in streams:
                choices = [event["choices"][0] for event in stream.wait_end(240) if event["choices"]]
                assert choices[-1]["finish_reason"] == "length"
            assert old.process.wait(60) == 0
            assert "open requests go on requests=" in old.log
            assert ready_status(new) == 200
            print("pause_s", new.metrics()["quire_takeover_pause_seconds"])
