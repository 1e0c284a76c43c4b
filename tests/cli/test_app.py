import subprocess
import sys

import pytest

import phalanx

COMMANDS = [
    ("pull",),
    ("generate",),
    ("chat",),
    ("info",),
    ("plan",),
    ("bench", "throughput"),
    ("bench", "latency"),
]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom phalanx.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'pydantic', 'msgspec') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "generate" in out and out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull", "smollm3"], "is not packaged"),
        (["generate", "smolm2", "x"], "did you mean 'smollm2'"),
        (["info", "no-such-model"], "neither a folder"),
    ],
)
def test_a_mistyped_model_is_told_without_torch(arguments: list[str], said: str) -> None:
    code = (
        "import sys\nfrom phalanx.cli import app\n"
        f"try:\n    app({arguments})\nexcept SystemExit as end:\n    assert end.code == 2\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said in done.stderr and done.stdout == "[]\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_speaks_json(run, command):
    done = run(*command, "--help")
    assert done.exit_code == 0 and "--json" in done.stdout and "--debug" in done.stdout


def test_version(run):
    assert run("--version").stdout == f"phalanx {phalanx.__version__}\n"


def test_a_mistyped_command_is_guessed(run):
    done = run("genrate", "x")
    assert done.exit_code == 2 and "Did you mean 'generate'?" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("command", [(), ("bench",), ("ckpt",)])
def test_without_a_command_there_is_help_and_no_error(run, command):
    done = run(*command)
    assert done.exit_code == 2 and "Usage: " in done.stdout and done.stderr == ""


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("phalanx ")
