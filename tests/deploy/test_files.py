"""Files of deploy/ are what they claim to be; tools that know their kinds agree, where there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.commands import DEPLOY, KUBERNETES

ROOT = DEPLOY.parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
YAML_FILES = sorted(path for path in DEPLOY.rglob("*") if path.suffix in (".yaml", ".yml"))
TEXT_FILES = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json"]
OVERLAYS = sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
# Kinds of operators, whose schemas are with the operators.
FOREIGN_KINDS = {"LeaderWorkerSet", "ServiceMonitor"}
REGISTRY = re.compile(r"\b(?:[\w-]+\.)+(?:io|com|dev|org|net)(?::\d+)?/[\w./-]+:[\w.-]+")


def tool(name: str) -> str:
    """A program beside this Python or on the PATH; skips without."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: see deploy/README.md")
    return found


def output_of(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_yaml_file_can_be_read(path: Path) -> None:
    assert [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_no_image_names_a_registry() -> None:
    """Whoever deploys says where images come from, by the settings of the runtime."""
    assert REGISTRY.search("image: images.example.io/someone/one:latest")
    found = {str(p): m[0] for p in TEXT_FILES if (m := REGISTRY.search(p.read_text()))}
    assert found == {}


# ---- Dockerfile ----------------------------------------------------------------------------------


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("role", "ports"), [("prefill", "30000 8998"), ("decode", "30001")])
def test_every_role_has_a_target_of_each_kind(role: str, ports: str, kind: str) -> None:
    text = stages()[f"{role}-{kind}"]
    assert f'ENTRYPOINT ["baton-{role}"]' in text
    assert f"EXPOSE {ports}\n" in text
    assert f"http://127.0.0.1:{ports.split()[0]}/health" in text


def test_entry_points_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    programs = re.findall(r'ENTRYPOINT \["(\S+)"\]', DOCKERFILE)
    assert set(programs) == {"baton-prefill", "baton-decode"} <= set(project["project"]["scripts"])
    packages = project["tool"]["scikit-build"]["wheel"]["packages"]
    sent = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{package}" for package in packages} <= set(sent)
    named = [line[1:] for line in sent if line.startswith("!")]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_one_version_of_ucx_is_named_everywhere() -> None:
    """Both servers should run one, whichever build each of them loads."""
    built = re.search(r"ARG UCX_VERSION=(\S+)", DOCKERFILE)
    assert built is not None
    for name in ("constraints.txt", "pyproject.toml", "tests/gpu/README.md"):
        named = re.findall(r"libucx-cu1[23]([=<>~!]+[0-9.]+)", (ROOT / name).read_text())
        assert named and set(named) == {f"=={built[1]}"}, f"{name}: {named}"


def test_the_user_of_images_and_pods_is_one() -> None:
    users = set(re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE))
    assert users == {("10001", "10001")}
    for role in ("prefill", "decode"):
        pod = (KUBERNETES / "base" / f"{role}.yaml").read_text()
        assert re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", pod) == ["10001"] * 3


@pytest.mark.slow
def test_hadolint_has_nothing_to_say() -> None:
    # DL3008 wants versions of Debian's packages, which go away when the next one comes.
    output_of(tool("hadolint"), "--ignore", "DL3008", DEPLOY / "Dockerfile")


# ---- tools that know the kinds -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml", "compose.keys.yaml"])
def test_compose_files_follow_the_specification(name: str) -> None:
    output_of(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DEPLOY / name)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_systemd_takes_the_units(role: str, tmp_path: Path) -> None:
    """With a program that is there in place of ours, which only a machine with Baton has."""
    name = f"baton-{role}@.service"
    text = (DEPLOY / "systemd" / name).read_text()
    unit = tmp_path / name
    unit.write_text(text.replace(f"/opt/baton/bin/baton-{role}", "/bin/true"))
    assert output_of(tool("systemd-analyze"), "verify", unit) == ""


def rendered(overlay: Path) -> list[dict]:
    return list(yaml.safe_load_all(output_of(tool("kubectl"), "kustomize", overlay)))


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_overlays_come_out_whole(overlay: Path) -> None:
    """Every ConfigMap that a pod mounts is there by its hashed name, and every image is ours."""
    resources = rendered(overlay)
    maps = {r["metadata"]["name"] for r in resources if r["kind"] == "ConfigMap"}
    text = yaml.safe_dump([r for r in resources if r["kind"] != "ConfigMap"])
    mounted = re.findall(r"configMap:\n\s+name: (\S+)", text)
    images = re.findall(r"image: (\S+)", text)
    assert len(maps) == 2 and set(mounted) == maps
    kind = "cpu" if overlay.name == "cpu" else "cuda"
    assert set(images) == {f"baton-prefill:{kind}", f"baton-decode:{kind}"}
    if importlib.util.find_spec("kubernetes_validate") is None:
        return
    import kubernetes_validate

    version = kubernetes_validate.latest_version()
    for resource in resources:
        if resource["kind"] not in FOREIGN_KINDS:
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.slow
def test_policies_and_monitors_select_our_pods() -> None:
    """A selector that a generator has changed would select nobody."""
    resources = {
        (r["kind"], r["metadata"]["name"]): r
        for r in rendered(KUBERNETES / "overlays" / "production")
    }
    policy = resources["NetworkPolicy", "baton"]["spec"]
    (monitor,) = (r for (kind, _), r in resources.items() if kind == "ServiceMonitor")
    labelled = [r for (kind, _), r in resources.items() if kind == "Service"]
    for service in labelled:
        chosen = monitor["spec"]["selector"]["matchLabels"].items()
        assert chosen <= service["metadata"]["labels"].items()
    (client, _) = policy["ingress"][1]["from"]
    assert client["podSelector"] == {"matchLabels": {"baton-client": "true"}}
    (ports,) = (one for one in policy["ingress"][0]["ports"] if "endPort" in one)
    flags = yaml.safe_load((KUBERNETES / "base" / "decode-flags.yaml").read_text())
    assert flags["transfer-ports"] == f"{ports['port']}-{ports['endPort']}"
    (names,) = policy["podSelector"]["matchExpressions"]
    for kind, name in (("Deployment", "baton-prefill"), ("Deployment", "baton-decode")):
        labels = resources[kind, name]["spec"]["template"]["metadata"]["labels"]
        assert labels[names["key"]] in names["values"]
