"""What the files for containers and services say of the server is what the server does. No other program is needed."""

import re
import tomllib
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml

from engine.interface.control import STALL_AFTER_S
from server.cli import main, serve_parser
from server.config.settings import CONFIG_VARIABLE
from server.launcher import shutdown

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DRAIN_S = 25.0 + shutdown._DRAIN_GRACE_S + shutdown._ENGINE_END_S


def seconds(text: str) -> float:
    """Return what 40, 60s, 15m or 10min is."""
    number, unit = re.fullmatch(r"(\d+)(s|m|min)?", text).groups()
    return float(number) * (60 if unit in ("m", "min") else 1)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined_pinned_watched_and_on_loopback_alone(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is (name != "open-webui")
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    assert service["ports"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert {"test", "interval", "timeout", "retries", "start_period", "start_interval"} <= set(service["healthcheck"])
    assert service["profiles"]


def test_services_wait_until_what_they_need_is_healthy() -> None:
    needs = {name: service["depends_on"] for name, service in SERVICES.items() if "depends_on" in service}
    assert set(needs) == {"grafana", "open-webui"}
    assert all(need["condition"] == "service_healthy" for wanted in needs.values() for need in wanted.values())


def test_both_servers_answer_to_one_name_and_get_their_drain_time() -> None:
    for name in ("quire-cpu", "quire-gpu"):
        assert SERVICES[name]["networks"]["default"]["aliases"] == ["quire"]
        assert seconds(SERVICES[name]["stop_grace_period"]) > DRAIN_S
        assert f"FROM runtime AS {SERVICES[name]['build']['target']}\n" in DOCKERFILE


def test_the_image_says_the_versions_name_and_stops_as_the_server_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert DOCKERFILE.count(f"ARG VERSION={project['version']}\n") == 2
    assert f'licenses="{project["license"]}"' in DOCKERFILE
    assert "STOPSIGNAL SIGTERM\n" in DOCKERFILE
    assert "USER 10001:10001\n" in DOCKERFILE


def test_constraints_leave_to_torch_what_torch_pins() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert "torch" in [pin.partition("==")[0] for pin in pins]
    assert not [pin for pin in pins if pin.startswith(("triton==", "nvidia-"))]  # or torch for CUDA goes with none


def test_every_package_of_ours_is_copied_into_the_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = shipped["packages"]["find"]["include"]
    for name in (pattern.rstrip("*") for pattern in packages if not pattern.startswith("deploy")):
        assert f"COPY {name} {name}\n" in DOCKERFILE
        assert f"!{name}" in ignored
    for name in shipped["py-modules"]:
        assert re.search(rf"(?m)^COPY .*\b{name}\.py .*\./$", DOCKERFILE)
        assert f"!{name}.py" in ignored


def test_every_variable_that_the_files_name_is_a_setting() -> None:
    known = {setting.variable for setting in serve_parser({}).settings} | {CONFIG_VARIABLE}
    files = [ROOT / name for name in ("Dockerfile", "docker-compose.yml", ".env.example")]
    files += [path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".yaml", ".yml", ".env", ".service")]
    named = {name for path in files for name in re.findall(r"\bQUIRE_[A-Z_]+", path.read_text(encoding="utf-8"))}
    assert "QUIRE_API_KEY" in named
    assert named <= known  # the server refuses what it does not know


def test_the_port_in_a_container_is_the_one_that_is_published() -> None:
    for name in ("quire-cpu", "quire-gpu"):
        assert SERVICES[name]["environment"]["QUIRE_PORT"] == "8000"  # stronger than .env
        assert SERVICES[name]["ports"][0].endswith(":8000")


def test_a_container_without_keys_is_for_this_machine_alone() -> None:
    for name in ("quire-cpu", "quire-gpu"):  # the ports are on loopback: a test above
        environment = SERVICES[name]["environment"]
        assert environment["QUIRE_ALLOW_ANONYMOUS"] == "true"  # or the image would refuse to start
        assert environment["QUIRE_ALLOWED_HOST"].startswith("quire$")  # checked then; Prometheus uses that name
    assert '"--host", "0.0.0.0"]' in DOCKERFILE
    assert "ALLOW_ANONYMOUS" not in DOCKERFILE.replace("QUIRE_ALLOW_ANONYMOUS=true it refuses", "")


def test_the_unit_waits_for_a_drain_and_for_a_stall() -> None:
    unit = RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(ROOT / "deploy/systemd/quire.service", encoding="utf-8")
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert seconds(service["TimeoutStopSec"]) > DRAIN_S
    assert seconds(service["WatchdogSec"]) > 2 * STALL_AFTER_S
    with pytest.raises(SystemExit) as wrong_usage:
        main(["serve", "--port", "x"])
    assert service["RestartPreventExitStatus"] == str(wrong_usage.value.code)
