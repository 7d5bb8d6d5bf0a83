"""Who may import whom: deployments -> flows -> tasks -> grpo, and within each of them the packages that lie lower."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "grpo": {"prefect", "mlflow", "pandas", "tasks", "flows", "deployments"},
    "tasks": {"flows", "deployments", "prefect"},
    "flows": {"torch", "transformers", "mlflow", "deployments"},
}
LAYERS = {
    "grpo": [
        {"secret_values", "other_environments"},
        {"errors", "settings"},
        {"processes", "http", "algorithms"},
        {"sandbox", "data", "model_folder", "dequantize"},
        {"rewards"},
        {"health"},
        {"config"},
        {"judging"},
        {"distributed"},
        {"model.cpu"},
        {"model.packed"},
        {"model.fused"},
        {"model"},
        {"model.sharded"},
        {"generation.vllm"},
        {"generation"},
        {"scoring"},
        {"sampling"},
        {"training"},
        {"rl"},
        {"trainers"},
        {"train", "chat", "validate", "check_model"},
        {"fork_server"},
    ],
    "tasks": [
        {"paths", "printable"},
        {"store", "problems", "judges", "trainer", "gates"},
        {"estimate"},
        {"sft_data"},
        {"preferences"},
        {"evaluation"},
        {"tracking"},
        {"report"},
        {"export"},
    ],
    "flows": [
        {"home", "prefect_server", "progress"},
        {"runs"},
        {"recipe"},
        {"stage_contract"},
        {"stages"},
        {"stage_flows", "stage_graphs"},
        {"run"},
        {"prefect_flows"},
        {"installation"},
        {"cli"},
    ],
}
"""Packages and modules of each room, lowest first. Each imports from itself and from lower layers."""
NO_TORCH = ("rewards", "sandbox", "processes", "health", "http", "config", "judging")
FLOWS_REACH = {"grpo.errors", "grpo.secret_values", "grpo.data", "grpo.config"}
LONGEST_FILE, LARGEST_FOLDER = 300, 15


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in it; of `from a import b`, both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def entry(module: str) -> tuple[int, str] | None:
    """Layer and entry of LAYERS that a module belongs to, the longest that fits; None for a room itself."""
    room, _, inner = module.partition(".")
    fits = [
        (number, name)
        for number, names in enumerate(LAYERS[room])
        for name in names
        if inner == name or inner.startswith(f"{name}.")
    ]
    return max(fits, key=lambda fit: len(fit[1])) if fits else None


def wrong_edges(room: str, edges: Iterator[tuple[str, str]]) -> list[str]:
    wrong = []
    for importer, target in edges:
        if not target.startswith(f"{room}."):
            continue
        above, below = entry(importer), entry(target)
        if above and below and above != below and below[0] >= above[0]:
            wrong.append(f"{importer} -> {target}")
    return wrong


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_only_what_lies_to_its_right(room: str) -> None:
    for path in modules(room):
        assert not {name.split(".")[0] for name in imported(path)} & FORBIDDEN[room], path


@pytest.mark.parametrize("room", LAYERS)
def test_every_module_has_a_layer(room: str) -> None:
    assert [dotted(path) for path in modules(room) if dotted(path) != room and entry(dotted(path)) is None] == []


@pytest.mark.parametrize("room", LAYERS)
def test_a_package_imports_only_from_lower_layers(room: str) -> None:
    edges = ((dotted(path), name) for path in modules(room) for name in imported(path))
    assert sorted(set(wrong_edges(room, edges))) == []


def test_a_wrong_import_is_noticed() -> None:
    upward, sideways = ("grpo.algorithms.kl", "grpo.rl.trainer"), ("grpo.http.client", "grpo.processes.pool")
    downward, inside = ("grpo.rl.trainer", "grpo.algorithms.kl"), ("grpo.rl.update", "grpo.rl.batch")
    assert wrong_edges("grpo", iter([upward, sideways, downward, inside])) == [
        "grpo.algorithms.kl -> grpo.rl.trainer",
        "grpo.http.client -> grpo.processes.pool",
    ]


def test_algorithms_import_torch_and_nothing_of_ours_but_errors() -> None:
    for path in modules("grpo/algorithms"):
        names = set(imported(path))
        ours = {name for name in names if name.startswith("grpo.")}
        assert all(name.startswith(("grpo.errors", "grpo.algorithms")) for name in ours), path
        assert {name.split(".")[0] for name in names} - sys.stdlib_module_names <= {"grpo", "torch"}, path


def test_kernels_and_fused_blocks_stay_inside_the_model() -> None:
    hidden = ("grpo.model.cpu", "grpo.model.fused")
    outside = [
        dotted(path)
        for path in modules("grpo")
        if not dotted(path).startswith("grpo.model") and any(name.startswith(hidden) for name in imported(path))
    ]
    assert outside == []


def test_the_reference_uses_algorithms_alone() -> None:
    ours = {name for name in imported(ROOT / "grpo/rl/reference.py") if name.startswith("grpo.")}
    assert all(name.startswith("grpo.algorithms") for name in ours), ours


def test_flows_reach_into_grpo_for_errors_secrets_data_and_config_alone() -> None:
    for path in modules("flows"):
        reached = {".".join(name.split(".")[:2]) for name in imported(path) if name.startswith("grpo.")}
        assert reached <= FLOWS_REACH, path


@pytest.mark.parametrize("package", NO_TORCH)
def test_a_package_does_not_load_torch(package: str) -> None:
    names = [dotted(path) for path in modules(f"grpo/{package}") if path.name not in ("pool_worker.py",)]
    code = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["False"]


def test_mlflow_is_imported_in_tracking_alone() -> None:
    knowing = [dotted(path) for path in modules("tasks") if "mlflow" in {n.split(".")[0] for n in imported(path)}]
    assert [name for name in knowing if not name.startswith("tasks.tracking.")] == []


def test_the_help_of_the_command_loads_no_large_library() -> None:
    code = "import sys, flows.cli.main as cli; cli.parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    large = {
        "torch",
        "transformers",
        "mlflow",
        "prefect",
        "pandas",
        "datasets",
        "numpy",
        "rich",
        "httpx",
        "huggingface_hub",
    }
    assert large & set(done.stdout.split()) == set()


def loaded(*imported: str) -> set[str]:
    """Modules that are loaded after these were imported."""
    code = f"import sys, {', '.join(imported)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


def test_the_command_does_not_load_torch() -> None:
    assert not {"torch", "mlflow"} & loaded("flows.prefect_flows", "flows.cli.main")


def test_a_plan_and_a_run_that_makes_nothing_do_not_load_prefect() -> None:
    assert not {"torch", "mlflow", "prefect", "pandas"} & loaded("flows.run.plan", "flows.run.executor")


def test_benchmarks_stay_small() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "benchmarks").glob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


@pytest.mark.parametrize("room", LAYERS)
def test_files_and_folders_stay_small(room: str) -> None:
    lengths = {dotted(path): len(path.read_text().splitlines()) for path in modules(room)}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}
    folders: dict[Path, int] = {}
    for path in modules(room):
        if path.name not in ("__init__.py", "__main__.py"):
            folders[path.parent] = folders.get(path.parent, 0) + 1
    large = {folder.name: count for folder, count in folders.items() if count > LARGEST_FOLDER}
    assert large.keys() <= {"stages", "cli"}, large


@pytest.mark.parametrize("room", LAYERS)
def test_a_class_name_stands_once(room: str) -> None:
    names: dict[str, list[str]] = {}
    for path in modules(room):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, []).append(dotted(path))
    assert {name: where for name, where in names.items() if len(where) > 1} == {}


@pytest.mark.parametrize("room", LAYERS)
def test_a_package_says_what_lives_there(room: str) -> None:
    silent = []
    for path in (ROOT / room).rglob("__init__.py"):
        if ast.get_docstring(ast.parse(path.read_text())) is None and any(path.parent.glob("[a-z]*.py")):
            silent.append(dotted(path))
    assert silent == []
