"""What a release is made of: pinned actions, locked packages, tests before publishing, hardened native code."""

import re
import runpy
import shutil
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gradwire

ROOT = Path(__file__).parents[1]
CI = ROOT / ".ci"
WORKFLOWS = {path.name: path.read_text("utf-8") for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
JOBS = {name: yaml.safe_load(text)["jobs"] for name, text in WORKFLOWS.items()}
LAYERS = ("compress", "kernels", "ddp_core", "hooks", "experiments")
LOCKS = {name: (CI / "locks" / f"{name}.txt").read_text("utf-8") for name in ("develop", "run", "tools")}
FROM_ELSEWHERE = ("torch", "torchvision")  # by .ci/torch
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def steps(job):
    return job.get("steps", [])


def run(script):
    """The names of a script of .ci."""
    return runpy.run_path(str(CI / script))


def table(name):
    """A list of requirements in pyproject.toml, which Python 3.10 has no parser for."""
    found = re.search(rf"^{name} = \[(.*?)\]$", PYPROJECT, re.MULTILINE | re.DOTALL)
    texts = re.findall(r'"([^"]+)"', re.sub(r"#.*", "", re.sub(r"\[(\w|,)+\]", "", found[1])))
    return [Requirement(text) for text in texts if not text.startswith("gradwire")]


def locked(name):
    """{package: versions} of a lock."""
    found = {}
    for line in re.findall(r"^[^\s#].*?(?= \\$)", LOCKS[name], re.MULTILINE):
        requirement = Requirement(line)
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement.specifier)
    return found


def test_every_action_is_pinned_by_commit_with_its_version_beside_it():
    pinned = re.compile(r"\./\.github/workflows/.*|[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+.*")
    uses = re.findall(r"uses: *(.*)", "\n".join(WORKFLOWS.values()))
    assert uses
    assert [used for used in uses if not pinned.fullmatch(used)] == []


def test_no_command_has_what_others_may_write_such_as_a_tag_pasted_into_it():
    commands = [step["run"] for jobs in JOBS.values() for job in jobs.values() for step in steps(job) if "run" in step]
    assert not [command for command in commands if "${{ github" in command or "${{ inputs" in command]
    assert not [command for command in commands if re.search(r'(?<!")\$GITHUB_REF_NAME', command)]


def test_tests_gate_what_a_tag_publishes():
    jobs = JOBS["wheels.yml"]
    assert jobs["tests"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call:" in WORKFLOWS["ci.yml"]
    assert set(jobs["publish"]["needs"]) == {"tests", "sdist", "wheels"}
    assert jobs["release"]["needs"] == "publish"
    for name, job in jobs.items():
        writes = [what for what, access in job.get("permissions", {}).items() if access == "write"]
        assert writes == {"publish": ["id-token"], "release": ["contents"]}.get(name, [])


def test_only_torch_comes_from_another_index_than_pypi_and_alone():
    files = [path for folder in (".ci", ".github") for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_text("utf-8") for path in [*files, ROOT / "Makefile", ROOT / "pyproject.toml"]}
    assert not [path for path, text in texts.items() if re.search("extra.index.url", text, re.IGNORECASE)]
    (only,) = [path for path, text in texts.items() if "index-url" in text]
    assert only == CI / "torch"
    assert "--no-deps --index-url https://download.pytorch.org/whl/cpu -r" in texts[only]


@pytest.mark.parametrize(
    ("name", "tables"),
    [("run", ["dependencies"]), ("develop", ["dependencies", "dev", "docs", "experiments", "wandb", "transformers"])],
)
def test_a_lock_fits_what_pyproject_asks_for(name, tables):
    pinned = locked(name)
    for requirement in (each for listed in tables for each in table(listed) if each.name not in FROM_ELSEWHERE):
        for version in pinned[canonicalize_name(requirement.name)]:
            assert requirement.specifier.contains(str(version).removeprefix("==")), requirement


def test_what_users_install_has_lower_bounds():
    for requirement in table("dependencies"):
        assert [each.operator for each in requirement.specifier] == [">="], requirement


def test_pages_and_messages_name_extras_that_there_are_in_the_form_for_an_installed_gradwire():
    extras = set(re.findall(r"^([\w-]+) = \[", PYPROJECT.split("[project.optional-dependencies]")[1], re.MULTILINE))
    sources = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *sources]
    text = "".join(path.read_text("utf-8") for path in paths)
    assert {"experiments", "lightning", "ray", "vision"} <= set(re.findall(r"gradwire\[([a-z\d-]+)\]", text)) <= extras
    assert not re.search(r"pip install '?\.\[", text)


def test_a_release_needs_a_tag_of_its_version_a_heading_in_the_changelog_and_no_placeholder():
    names = run("version.py")
    problems, unfilled = names["problems"], names["unfilled"]()
    assert problems("v9.9.9")[0] == f"the tag is v9.9.9, pyproject.toml says {gradwire.__version__}"
    released = f"## [{gradwire.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert (problems(f"v{gradwire.__version__}") == []) == (released and not unfilled)
    assert all(f"{name} has placeholders, see .github/PUBLISHER.md" in problems("v9.9.9") for name in unfilled)


def test_the_notes_of_a_release_are_its_section_of_the_changelog_with_whole_links_and_joined_lines():
    notes, page = run("notes.py")["notes"], "https://host/us/tree"
    parts = ["# Changes", "## [Unreleased]\n- a", "## [0.2.0] - today\nOne\nline.", "### Added\n- b [c](d.md)\n  e"]
    changelog = "\n\n".join([*parts, "## [0.1.0]\n- f"])
    assert notes(changelog, "v0.2.0", page) == f"One line.\n\n### Added\n- b [c]({page}/blob/v0.2.0/d.md) e"
    with pytest.raises(SystemExit, match=r"nothing under a heading \[0\.3\.0\]"):
        notes(changelog, "v0.3.0", page)


def test_a_release_gets_its_notes():
    making, releasing = [step["run"] for step in steps(JOBS["wheels.yml"]["release"]) if "run" in step]
    assert making.startswith("python3 .ci/notes.py ")
    assert making.endswith(" > notes.md")
    assert " --notes-file notes.md " in releasing


def test_one_wheel_serves_every_torch_since_native_code_includes_none_of_its_headers():
    sources = [path for layer in ("kernels", "ddp_core") for path in (ROOT / layer).rglob("*.[ch]pp")]
    included = {name for path in sources for name in re.findall(r'#\s*include [<"](.+?)[>"]', path.read_text("utf-8"))}
    assert "Python.h" in included
    assert not [name for name in included if re.match("torch|ATen|c10|pybind11", name)]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf, of binutils")
def test_native_code_has_relro_bind_now_and_a_stack_protector():
    built = [path for layer in ("kernels", "ddp_core") for path in (ROOT / layer).rglob("*.so")]
    if not built:
        pytest.skip("nothing is built")
    missing = run("hardened.py")["missing"]
    assert {path.name: missing(path) for path in built} == {path.name: [] for path in built}
