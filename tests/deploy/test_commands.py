"""What deploy/ starts is what the servers take: its flags go through their own parsers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from common.config import Role, ServerConfig
from common.exit_codes import EXIT_CONFIG
from common.metrics.seen import QUEUES
from common.prefill_entries import DnsName, read_entry
from common.runtime.supervisor import END_TIMEOUT_S, LAST_ANSWERS_TIMEOUT_S
from tests.deploy.commands import (
    DEPLOY,
    KUBERNETES,
    Command,
    compose_commands,
    compose_services,
    documents,
    example_environment,
    interpolate,
    kubernetes_commands,
    systemd_commands,
    unit_settings,
    workload,
)

COMMANDS = [
    *compose_commands(),
    *compose_commands("compose.cuda.yaml", "compose.keys.yaml"),
    *kubernetes_commands(),
    *systemd_commands(),
]


def parsed(where: str, root: Path) -> ServerConfig:
    return next(command for command in COMMANDS if command.where == where).parse(root)


def test_every_way_of_deploying_is_looked_at() -> None:
    wheres = [command.where for command in COMMANDS]
    assert len(set(wheres)) == len(wheres) == 18
    assert {"keys decode", "cuda prefill", "multi-node workerTemplate"} <= set(wheres)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.where)
def test_the_servers_take_every_command_line(command: Command, tmp_path: Path) -> None:
    config = command.parse(tmp_path)
    assert config.role == Role(command.role)
    assert config.host != "127.0.0.1"  # nobody would reach it
    has_keys = "keys" in command.where
    assert bool(config.curve_secret_key_file) == has_keys
    is_on_gpu = any(word in command.where for word in ("cuda", "multi-node"))
    if "compose" in command.where:
        assert config.device == "cpu"
    else:
        assert config.device == ("cuda" if is_on_gpu else "auto")


def test_a_kind_of_compose_is_the_device_of_its_servers() -> None:
    services = compose_services(environment=example_environment() | {"BATON_KIND": "cuda"})
    for name in ("prefill", "prefill-1", "decode"):
        command = services[name]["command"]
        assert command[command.index("--device") + 1] == "cuda"
        assert services[name]["build"]["target"].endswith("-cuda")


def test_servers_on_gpus_compute_on_their_own_and_see_each_others() -> None:
    services = compose_services("compose.cuda.yaml")
    lists = {
        name: services[name]["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
        for name in ("prefill", "prefill-1", "decode")
    }
    own = {name: gpus[0] for name, gpus in lists.items()}
    assert len(set(own.values())) == 3
    for name in ("prefill", "prefill-1"):
        assert own["decode"] in lists[name]
    assert own["prefill"] in lists["decode"]


def test_compose_asks_for_a_checkpoint() -> None:
    with pytest.raises(KeyError, match="BATON_MODEL_DIR"):
        interpolate((DEPLOY / "compose.yaml").read_text(), {})


def test_second_machine_of_a_group_is_node_one(tmp_path: Path) -> None:
    config = parsed("multi-node workerTemplate", tmp_path)
    (group,) = documents(KUBERNETES / "overlays" / "multi-node" / "prefill.yaml")
    template = group["spec"]["leaderWorkerTemplate"]
    assert (config.nnodes, config.node_rank, config.tp_size) == (template["size"], 1, 16)
    limits = template["workerTemplate"]["spec"]["containers"][0]["resources"]["limits"]
    assert len(config.local_ranks) == int(limits["nvidia.com/gpu"])
    assert config.dist_init_addr == "baton-prefill-0.baton-prefill:20000"


# ---- ports and names -----------------------------------------------------------------------------


def test_compose_dials_and_shows_where_servers_listen(tmp_path: Path) -> None:
    services = compose_services()
    decode = parsed("compose  decode", tmp_path)
    prefill = parsed("compose  prefill", tmp_path)
    (entry,) = map(read_entry, decode.prefill)
    assert entry == DnsName("prefill-servers", prefill.bootstrap_port)
    named = {
        name
        for name, service in services.items()
        if entry.name in service.get("networks", {}).get("default", {}).get("aliases", [])
    }
    assert named == {"prefill", "prefill-1"}
    assert services["decode"]["ports"] == [f"127.0.0.1:30001:{decode.port}"]
    scrape = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["configs"]["scrape"]["content"]
    (job,) = yaml.safe_load(scrape)["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [
        f"prefill:{prefill.port}",
        f"prefill-1:{prefill.port}",
        f"decode:{decode.port}",
    ]


def test_servers_share_the_namespaces_that_shared_memory_needs() -> None:
    services = compose_services()
    for name in ("prefill", "prefill-1", "decode"):
        assert (services[name]["pid"], services[name]["ipc"]) == ("service:space", "service:space")
    assert services["space"]["ipc"] == "shareable" and services["space"]["init"] is True


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pods_and_services_have_the_ports_of_the_server(role: str, tmp_path: Path) -> None:
    config = parsed(f"base {role}", tmp_path)
    ports = {"http": config.port}
    if role == "prefill":
        ports["bootstrap"] = config.bootstrap_port
    (container,) = workload(role)["spec"]["template"]["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
    service = documents(KUBERNETES / "base" / f"{role}.yaml")[0]
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    labels = workload(role)["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == workload(role)["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == labels


def test_decode_servers_find_every_pod_by_the_name_of_its_service(tmp_path: Path) -> None:
    (entry,) = map(read_entry, parsed("base decode", tmp_path).prefill)
    service = documents(KUBERNETES / "base" / "prefill.yaml")[0]
    assert service["spec"]["clusterIP"] == "None", "its name would stand for one address"
    port = parsed("base prefill", tmp_path).bootstrap_port
    assert entry == DnsName(service["metadata"]["name"], port)
    targets = {
        scaler["spec"]["scaleTargetRef"]["name"]: scaler["spec"]["scaleTargetRef"]["kind"]
        for scaler in documents(KUBERNETES / "components" / "autoscaling" / "autoscaling.yaml")
    }
    workloads = [workload(role) for role in ("prefill", "decode")]
    assert targets == {one["metadata"]["name"]: one["kind"] for one in workloads}


def test_only_leaders_of_groups_are_found_by_the_name_of_their_service() -> None:
    """The second machine of a group listens to no decode server."""
    path = KUBERNETES / "overlays" / "multi-node" / "kustomization.yaml"
    (overlay,) = documents(path)
    patches = [yaml.safe_load(one["patch"]) for one in overlay["patches"]]
    (service,) = (one for one in patches if isinstance(one, dict) and one["kind"] == "Service")
    assert (
        service["metadata"]["name"]
        == documents(KUBERNETES / "base" / "prefill.yaml")[0]["metadata"]["name"]
    )
    assert service["spec"]["selector"] == {"leaderworkerset.sigs.k8s.io/worker-index": "0"}


def test_units_dial_where_units_listen(tmp_path: Path) -> None:
    prefill, decode = parsed("systemd prefill", tmp_path), parsed("systemd decode", tmp_path)
    assert decode.prefill == (f"{prefill.host}:{prefill.bootstrap_port}",)


# ---- ends ----------------------------------------------------------------------------------------


def test_nobody_is_killed_before_its_drain_is_over(tmp_path: Path) -> None:
    """A drain, then what processes may take beyond it, and the last answers if they were killed."""
    ends_s = 2 * END_TIMEOUT_S + LAST_ANSWERS_TIMEOUT_S
    for role in ("prefill", "decode"):
        base = parsed(f"base {role}", tmp_path)
        pod = workload(role)["spec"]["template"]["spec"]
        pause_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= pause_s + base.drain_timeout_s + ends_s
        unit = parsed(f"systemd {role}", tmp_path)
        assert float(unit_settings(role)["TimeoutStopSec"]) >= unit.drain_timeout_s + ends_s
        service = compose_services()[role]
        compose = parsed(f"compose  {role}", tmp_path)
        assert float(service["stop_grace_period"].rstrip("s")) >= compose.drain_timeout_s + ends_s


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_units_start_again_what_can_go_on_and_nothing_else(role: str) -> None:
    settings = unit_settings(role)
    assert settings["Restart"] == "on-failure"
    assert settings["RestartPreventExitStatus"] == str(EXIT_CONFIG)
    assert settings["KillMode"] == "mixed"
    assert settings["LimitMEMLOCK"] == "infinity"


def test_autoscaling_asks_for_queues_that_exist() -> None:
    shown = {view.name for metric in QUEUES for view in metric.views}
    (values,) = documents(KUBERNETES / "components" / "autoscaling" / "adapter-values.yaml")
    rules = values["rules"]["custom"]
    assert {rule["seriesQuery"].partition("{")[0] for rule in rules} <= shown
    scalers = documents(KUBERNETES / "components" / "autoscaling" / "autoscaling.yaml")
    asked = {metric["pods"]["metric"]["name"] for s in scalers for metric in s["spec"]["metrics"]}
    assert asked == {rule["name"]["as"] for rule in rules}
