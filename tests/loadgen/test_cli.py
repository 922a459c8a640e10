import subprocess
import sys

from typer.testing import CliRunner

from loadgen.cli import app


def test_help_shows_commands_and_examples():
    shown = CliRunner().invoke(app, ["--help"], prog_name="loadgen")
    assert shown.exit_code == 0
    assert "replica" in shown.output and "loadgen replica --replicas 4" in shown.output


def test_a_subcommand_parses_its_own_options():
    runner = CliRunner()
    shown = runner.invoke(app, ["replica", "--help"])
    assert shown.exit_code == 0 and "--blocks" in shown.output
    assert runner.invoke(app, ["replica", "--no-such-option"]).exit_code == 2


def test_help_does_not_load_the_engine():
    """Loading it takes several times as long as showing the help."""
    code = (
        "import sys, loadgen.cli, loadgen.demo.command\n"
        "print([name for name in ('tokenizers', 'zmq', 'httpx', 'rich.progress')"
        " if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert run.stdout.strip() == "[]", run
