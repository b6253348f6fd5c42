"""The architecture page, its picture and the imports of the package agree."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tools.docs.architecture import PAGE, PICTURE, draw, layers

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "parallel2d"


def modules():
    """Dotted name -> path of every module of the package."""
    found = {}
    # parallel2d/models and parallel2d/conf are links to the other two.
    for folder in (PACKAGE, "models", "conf"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[0] != PACKAGE:
                parts = (PACKAGE, *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(name, path):
    """Every name that a module imports: at the top, inside functions, relative, for types, and by
    importlib."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, node.module] if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            named = [each.value for each in node.args[:1] if isinstance(each, ast.Constant)]
            yield from map(str, named)


def module_of(target):
    """Return the module of this package that contains an imported name; None for modules of other
    packages.
    """
    while target and target not in MODULES:
        target = target.rpartition(".")[0]
    return target or None


def uses():
    """Module -> modules of ours that it imports. The face imports by name, when it is asked."""
    found = {}
    for name, path in MODULES.items():
        targets = {module_of(target) for target in imported(name, path)}
        found[name] = targets - {None, name, PACKAGE}
    found.pop(PACKAGE)
    return found


def packages():
    """Packages in the order of the page; each may import the packages after it."""
    page = [package for entries in layers(PAGE.read_text()).values() for package, _ in entries]
    return [package.removesuffix("/").removesuffix(".py").replace("/", ".") for package in page]


def package_of(module):
    """The package of the page that contains a module: a file or a folder of one of the five folders, one
    of these folders, or a command. The `__init__` of a folder is as low as its lowest package."""
    words = module.split(".")[1:]
    known = [".".join(words[:length]) for length in (2, 1)]
    # A module of a folder that the page does not list is its own package, which a test then misses.
    unlisted = known[0] if words[0] in FOLDERS else known[-1]
    return next((name for name in known if name in packages()), unlisted)


# They hold packages; `__init__` is a docstring.
FOLDERS = {"base", "parallel", "training", "instruments"}


def test_architecture_page_names_every_package_once():
    found = {package_of(name) for name in MODULES if "." in name}
    assert sorted(packages()) == sorted(found - {"conf"} - FOLDERS)


def test_imports_point_down_or_to_the_right():
    place = {package: number for number, package in enumerate(packages())}
    wrong = [
        f"{module} imports {target}"
        for module, targets in uses().items()
        for target in targets
        if not {package_of(module), package_of(target)} & {"conf", *FOLDERS}
        and place[package_of(module)] > place[package_of(target)]
    ]
    assert not wrong


def test_imports_have_no_cycle():
    graph, done = uses(), set()
    for start in graph:
        _visit(start, graph, (), done)


def _visit(module, graph, path, done):
    assert module not in path, f"circle: {' -> '.join([*path, module])}"
    if module in done:
        return
    for target in graph.get(module, ()):
        _visit(target, graph, (*path, module), done)
    done.add(module)


@pytest.mark.parametrize(
    ("library", "where"),
    [
        (
            "hydra",
            {
                f"parallel2d.base.config.{name}"
                for name in ("composition", "error_messages", "overrides", "schema", "sweep")
            },
        ),
        ("transformers", {"parallel2d.models.huggingface"}),
        ("peft", {"parallel2d.models.adapters"}),
    ],
)
def test_library_is_imported_only_in_its_module(library, where):
    found = {
        name
        for name, path in MODULES.items()
        if any(target.partition(".")[0] == library for target in imported(name, path))
    }
    assert found == where


def test_configuration_is_loaded_without_torch():
    for name, path in MODULES.items():
        if name.startswith(("parallel2d.base.config", "parallel2d.base.errors")):
            assert "torch" not in {target.partition(".")[0] for target in imported(name, path)}


def test_picture_of_architecture_page_is_up_to_date():
    assert draw(PAGE.read_text()) == PICTURE.read_text(), "run python -m tools.docs.architecture"


def test_architecture_page_names_existing_files():
    text = PAGE.read_text()
    section = text[text.index("## Where to change what") :]
    named = [word for word in section.split("`") if word.endswith((".py", "/")) and " " not in word]
    assert len(named) > 20
    for word in named:
        assert (ROOT / PACKAGE / word).exists() or (ROOT / word).exists(), word


def way(title):
    """The (path, name) of each row of a way on the page, in its order."""
    text = PAGE.read_text()
    section = text[text.index(f"### {title}") :].split("\n#", 1)[0]
    return re.findall(r"^\| `([\w/.]+)` \| `(\w+)` \|", section, re.M)


def names_in(path):
    """Names that a file defines at its top level, and all names that it reads or imports."""
    tree = ast.parse((ROOT / PACKAGE / path).read_text())
    defined = {getattr(node, "name", None) for node in tree.body}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    return defined, used


ARGUMENT = "From `strategy=zero3` to `fully_shard`"
GRADIENT = "One gradient, from autograd to the optimizer"
LOSS = "From a killed rank to the next step"


@pytest.mark.parametrize(("title", "most"), [(ARGUMENT, 15), (GRADIENT, 9), (LOSS, 14)])
def test_reading_path_is_short_and_its_files_define_the_named_symbols(title, most):
    steps = way(title)
    assert 0 < len({path for path, _ in steps}) == len(steps) <= most
    for path, name in steps:
        assert name in names_in(path)[0], f"{path} does not define {name}"


def test_each_symbol_of_a_reading_path_is_used_by_another_file_on_it():
    steps = way(ARGUMENT)
    used = {path: names_in(path)[1] for path, _ in steps}
    for path, name in steps[1:]:
        assert any(name in used[other] for other in used if other != path), name
    tree = ast.parse((ROOT / PACKAGE / steps[-1][0]).read_text())
    last = next(node for node in tree.body if getattr(node, "name", None) == steps[-1][1])
    assert "fully_shard" in {getattr(node, "id", None) for node in ast.walk(last)}


def test_table_of_tests_names_every_file():
    named = re.findall(r"^\| `(test_\w+\.py)` \|", (ROOT / "tests" / "README.md").read_text(), re.M)
    assert sorted(named) == sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))


def test_pyproject_lists_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(settings["packages"]) == found
