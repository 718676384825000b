"""The house: who may import whom, what importing costs, and what a wheel holds."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

# Imports run one way, from a lower floor to none above it. A module of tiny_engram that is not named here is concept machinery.
FLOORS = {
    "tiny_engram.kernels": 0,
    **{f"tiny_engram.{name}": 1 for name in ("config", "errors", "files", "tokenizer", "hashing", "quantization", "table", "layer")},
    "tiny_engram.adapter": 3,
    "tiny_engram.llm": 3,
    "tiny_engram.llm_training": 4,
    "tiny_engram.training": 3,
    "tiny_engram.training.__main__": 6,
    "tiny_engram.pipelines": 4,
    "tiny_engram.studio": 5,
    "tiny_engram.cli": 6,
    "tiny_engram.table_cli": 6,
    "tiny_engram.library_cli": 6,
    "tiny_engram.facts_cli": 6,
    "tiny_engram.generate_cli": 6,
    "tiny_engram.push_cli": 6,
    "tiny_engram.train_cli": 6,
    "tiny_engram.scan_cli": 6,
    "tiny_engram.manifest_cli": 6,
    "tiny_engram.demo_llm": 6,
    "tiny_engram.demo": 6,
    "tiny_engram.__main__": 6,
}
CONCEPTS = 2
# Only what these folders hold may name these packages at all; elsewhere they would make the library heavy.
HOMES = {
    "triton": ("tiny_engram.kernels",),
    "gradio": ("tiny_engram.studio.ui", "tiny_engram.studio.server"),
    "huggingface_hub": ("tiny_engram.hub",),
}


def floor_of(module: str) -> int:
    parts = module.split(".")
    return FLOORS.get(module, FLOORS.get(".".join(parts[:2]), CONCEPTS))


def sources(root: Path) -> dict[str, Path]:
    """Module name -> file, by the one import name that each file has."""
    found = {}
    for folder, prefix in (("tiny_engram", ""), ("kernels", "tiny_engram."), ("pipelines", "tiny_engram.")):
        for path in sorted((root / folder).rglob("*.py")):
            name = prefix + path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
            if not name.startswith(("tiny_engram.kernels", "tiny_engram.pipelines")) or prefix:
                found[name.removesuffix(".__init__")] = path
    return found


def imports_of(name: str, path: Path, known: set[str]) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                out.add(inner if inner in known or inner in FLOORS else base)
    return out


def test_imports_run_one_way(repo_root):
    modules = sources(repo_root)
    assert len(modules) > 20 and "tiny_engram.kernels.fixed_basis.reference" in modules
    wrong = []
    for name, path in modules.items():
        if name == "tiny_engram":
            continue  # the facade, which loads nothing before it is asked
        for target in imports_of(name, path, set(modules)):
            if target.startswith("tiny_engram.") and floor_of(target) > floor_of(name):
                wrong.append(f"{name} imports {target}")
            if target.split(".")[0] in ("kernels", "pipelines"):
                wrong.append(f"{name} imports {target}: the only name is tiny_engram.{target}")
            for package, homes in HOMES.items():
                if target.split(".")[0] == package and not name.startswith(homes):
                    wrong.append(f"{name} imports {package}")
            if name.startswith("tiny_engram.kernels") and target.split(".")[0] in ("numpy", "transformers", "diffusers"):
                wrong.append(f"{name} imports {target}: kernels take torch and triton only")
    assert not wrong, "\n".join(wrong)


def run_python(code: str, cwd: Path, *, env: dict[str, str] | None = None) -> str:
    # With -c the first entry of sys.path is the working directory, as it is the script's folder for `python app.py`.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light(tmp_path):
    heavy = "[n for n in ('torch', 'numpy', 'diffusers', 'transformers', 'gradio', 'triton', 'accelerate') if n in sys.modules]"
    assert run_python(f"import sys, tiny_engram; print({heavy})", tmp_path) == "[]"


def test_core_loads_neither_diffusers_nor_gradio_nor_triton(tmp_path):
    core = ", ".join(f"tiny_engram.{name}" for name in ("config", "tokenizer", "hashing", "quantization", "table", "layer"))
    heavy = "[n for n in ('diffusers', 'transformers', 'gradio', 'triton', 'accelerate') if n in sys.modules]"
    assert run_python(f"import sys, {core}; print({heavy})", tmp_path) == "[]"


def test_every_lazy_name_has_a_home(repo_root):
    import tiny_engram

    assert set(tiny_engram._HOMES) <= set(tiny_engram.__all__) <= set(dir(tiny_engram))
    assert tiny_engram.ConceptConfig.__module__ == "tiny_engram.config"
    with pytest.raises(AttributeError, match="atach"):
        tiny_engram.atach  # noqa: B018


def test_root_folders_are_no_packages(repo_root):
    for folder in ("kernels", "pipelines"):
        assert not (repo_root / folder / "__init__.py").exists()
        link = repo_root / "tiny_engram" / folder
        assert link.is_symlink() and os.readlink(link) == f"../{folder}"
    for op in (path for path in (repo_root / "kernels").iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert (op / "__init__.py").exists() and (op / "reference.py").exists(), op


PROBE = """
import importlib.util
from transformers.utils import import_utils
from diffusers.utils import import_utils as diffusers_utils
import transformers.models.clip.modeling_clip
spec = importlib.util.find_spec("kernels")
print(spec.origin if spec else None, import_utils._is_package_available("kernels", return_version=True)[0],
      diffusers_utils.is_kernels_available(), sep="|")
"""


def test_the_kernels_folder_is_not_taken_for_the_package(repo_root):
    origin, transformers_sees, diffusers_sees = run_python(PROBE, repo_root).split("|")
    assert origin == "None" and transformers_sees == "False" and diffusers_sees == "False"


def test_the_kernels_package_is_found_past_the_folder(repo_root, tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.1'\n")
    info = tmp_path / "kernels-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.1\n")
    origin, transformers_sees, _ = run_python(PROBE, repo_root, env={"PYTHONPATH": str(tmp_path)}).split("|")
    assert Path(origin) == package / "__init__.py" and transformers_sees == "True"


def test_editable_install_works_from_another_directory(repo_root, tmp_path):
    code = "import tiny_engram.kernels.ngram_hash as op, importlib.util as u; print(op.__file__, u.find_spec('kernels'), sep='|')"
    where, top_level = run_python(code, tmp_path).split("|")
    assert Path(where).resolve() == repo_root / "kernels" / "ngram_hash" / "__init__.py"
    assert top_level == "None"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Wheel and source archive, the wheel made from the archive as an installer would."""
    root = Path(__file__).resolve().parent.parent
    work = tmp_path_factory.mktemp("build")
    checkout, out = work / "checkout", work / "dist"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, checkout / name)
    for name in ("kernels", "pipelines", "tiny_engram"):
        shutil.copytree(root / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(checkout)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def test_wheel_and_archive_hold_every_module_once(built, repo_root):
    wanted = {name.replace(".", "/") for name in sources(repo_root)}
    wheel, archive = built
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(archive) as tar:
        in_archive = {name.partition("/")[2] for name in tar.getnames()}
    for held in (in_wheel, in_archive):
        lacking = [name for name in wanted if f"{name}.py" not in held and f"{name}/__init__.py" not in held]
        assert not lacking
        assert {"tiny_engram/py.typed", "tiny_engram/table/native_gather.c"} <= held
        assert not [name for name in held if name.startswith(("kernels/", "pipelines/")) or "__pycache__" in name]
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel)


def test_wheel_works_without_the_checkout(built, tmp_path):
    zipfile.ZipFile(built[0]).extractall(tmp_path / "site")
    code = "import tiny_engram.hashing as h, tiny_engram.kernels.row_gather as r; print(h.__file__, r.__file__, sep='|')"
    for place in run_python(code, tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}).split("|"):
        assert Path(place).is_relative_to(tmp_path / "site")
