"""What deploy/ starts: every command line of a server, with the files that it reads there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from common.config import ServerConfig
from decode_server.config import parse_args as parse_decode
from prefill_server.config import parse_args as parse_prefill

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"
PARSERS: dict[str, Callable[[Sequence[str]], ServerConfig]] = {
    "prefill": parse_prefill,
    "decode": parse_decode,
}
# What stands for a checkpoint in these files.
MODEL_PATHS = re.compile(r"(?<![\w/])/(?:srv/)?models(?:/model)?(?![\w/])")
# What LeaderWorkerSet puts into the environment of the second machine's pod.
POD_VARIABLES = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "baton-prefill-0.baton-prefill",
}


@dataclass(frozen=True, slots=True)
class Command:
    """One start of a server. files: path there -> text."""

    where: str
    role: str
    argv: list[str]
    files: dict[str, str] = field(default_factory=dict)

    def parse(self, root: Path) -> ServerConfig:
        """The settings, by the server's own parser. root: stands for `/` of the machine there."""
        return PARSERS[self.role](self.localized_argv(root))

    def localized_argv(self, root: Path) -> list[str]:
        """The flags, with every file written below `root`.

        Key files are the operator's: those that are named and not given here get a key.
        """
        for path, text in self.files.items():
            write(root, path, self._localized(text, root))
        return [self._localized(_expand(arg), root) for arg in self.argv]

    def _localized(self, text: str, root: Path) -> str:
        """A flag or a file of flags, with the paths of this machine."""
        for path in set(re.findall(r"(?<![\w/])/(?:etc|run)/[\w./-]+", text)):
            if path not in self.files:
                write(root, path, "some-key\n")
        text = re.sub(r"(?<![\w/])(?=/(?:etc|run)/)", str(root), text)
        return MODEL_PATHS.sub(str(CHECKPOINT), text)


def write(root: Path, path: str, text: str) -> None:
    target = root / path.removeprefix("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    target.chmod(0o600)


def _expand(arg: str) -> str:
    """As a kubelet does it; an unknown variable is left as it stands, for the parser to refuse."""
    return re.sub(r"\$\((\w+)\)", lambda match: POD_VARIABLES.get(match[1], match[0]), arg)


def documents(path: Path) -> list[dict]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


# ---- compose -------------------------------------------------------------------------------------


def interpolate(text: str, environment: Mapping[str, str]) -> str:
    """As compose does it: ${NAME}, ${NAME:-default}, ${NAME:?why}."""

    def value(match: re.Match[str]) -> str:
        if environment.get(match["name"]):
            return environment[match["name"]]
        if match["kind"] == "?":
            raise KeyError(match["name"])
        return match["rest"] or ""

    return re.sub(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}", value, text)


def example_environment() -> dict[str, str]:
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def compose_services(*overlays: str, environment: Mapping[str, str] | None = None) -> dict:
    """Services by name; of overlays, what they say of a command, which takes the base's place."""
    environment = example_environment() if environment is None else environment
    services: dict = {}
    for name in ("compose.yaml", *overlays):
        document = yaml.safe_load(interpolate((DEPLOY / name).read_text(), environment))
        for service, fields in document["services"].items():
            before = services.get(service, {})
            services[service] = before | fields | _appended(before, fields)
    return services


def _appended(base: dict, overlay: dict) -> dict:
    """Compose appends lists other than commands."""
    both = [key for key in ("volumes", "secrets") if key in base and key in overlay]
    return {key: [*base[key], *overlay[key]] for key in both}


def compose_commands(*overlays: str) -> Iterator[Command]:
    for name, service in compose_services(*overlays).items():
        role = name.partition("-")[0]
        if role not in PARSERS:
            continue
        mounts = (volume.split(":") for volume in service["volumes"])
        files = {
            mount[1]: (DEPLOY / mount[0]).read_text()
            for mount in mounts
            if mount[0].startswith("./")
        }
        yield Command(f"compose {' '.join(overlays)} {name}", role, service["command"], files)


# ---- Kubernetes ----------------------------------------------------------------------------------


def flag_files(role: str) -> dict[str, str]:
    name = f"{role}-flags.yaml"
    return {f"/etc/baton/{name}": (KUBERNETES / "base" / name).read_text()}


def workload(role: str) -> dict:
    """The Deployment of a role, as the base has it."""
    found = documents(KUBERNETES / "base" / f"{role}.yaml")
    return next(document for document in found if "template" in document["spec"])


def base_args(role: str) -> list[str]:
    args: list[str] = workload(role)["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def kubernetes_commands() -> Iterator[Command]:
    """What the base starts, and with the flags that each overlay and component adds."""
    for role in PARSERS:
        yield Command(f"base {role}", role, base_args(role), flag_files(role))
    for path in sorted(KUBERNETES.glob("*/*/kustomization.yaml")):
        added = list(_added_flags(path))
        if added:
            for role in PARSERS:
                where = f"{path.parent.name} {role}"
                yield Command(where, role, base_args(role) + added, flag_files(role))
    (group,) = documents(KUBERNETES / "overlays" / "multi-node" / "prefill.yaml")
    for kind, template in group["spec"]["leaderWorkerTemplate"].items():
        if kind.endswith("Template"):
            args = template["spec"]["containers"][0]["args"]
            yield Command(f"multi-node {kind}", "prefill", args, flag_files("prefill"))


def _added_flags(kustomization: Path) -> Iterator[str]:
    (document,) = documents(kustomization)
    for patch in document.get("patches", []):
        operations = yaml.safe_load(patch["patch"])
        for operation in operations if isinstance(operations, list) else []:
            if operation["path"].endswith("/args/-"):
                yield operation["value"]


# ---- systemd -------------------------------------------------------------------------------------


def unit_settings(role: str) -> dict[str, str]:
    text = (DEPLOY / "systemd" / f"baton-{role}@.service").read_text()
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def systemd_commands() -> Iterator[Command]:
    for role in PARSERS:
        program, *argv = unit_settings(role)["ExecStart"].replace("%i", "0").split()
        assert program == f"/opt/baton/bin/baton-{role}"
        text = (DEPLOY / "systemd" / f"{role}-0.yaml").read_text()
        files = {f"/etc/baton/{role}-0.yaml": text}
        yield Command(f"systemd {role}", role, argv, files)
        with_keys = re.sub(r"^# (\S+-file: )", r"\1", text, flags=re.MULTILINE)
        assert with_keys.count("-file: ") == text.count("# ") - 2 == 3
        yield Command(f"systemd {role} keys", role, argv, {argv[-1]: with_keys})
