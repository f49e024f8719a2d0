"""Our kernels over the real FlashInfer: every plan and run of its wrappers, against SDPA."""

from __future__ import annotations

import pytest

from tests.kernel_packages.packages import PACKAGES, needs_packages, run_checks

pytestmark = [needs_packages, pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return run_checks("flashinfer_checks")


@pytest.mark.parametrize(
    "part",
    [
        "pages_are_attended",
        "recordings_read_the_last_plan",
        "latent_rows_are_attended",
        "small_functions_are_fused",
        "heads_are_rotated",
        "what_is_compiled_is_of_the_kind",
        "options_are_those_of_the_wrappers",
    ],
)
def test_the_wrappers_do_what_ours_takes_them_for(found: dict[str, str], part: str) -> None:
    held = {name: trace for name, trace in found.items() if part in name}
    assert held, found.keys()
    failed = [f"{name}\n{trace}" for name, trace in held.items() if trace]
    assert not failed, "\n".join(failed)


def test_the_checks_are_made_with_the_version_that_servers_get() -> None:
    (release,) = PACKAGES.glob("flashinfer_python-*.dist-info")
    constraints = (PACKAGES.parents[1] / "constraints.txt").read_text().splitlines()
    assert (
        release.name.removesuffix(".dist-info")
        .replace("_", "-")
        .replace("flashinfer-python-", "flashinfer-python==")
        in constraints
    )
