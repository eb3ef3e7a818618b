"""Everything in shim/ logs through `process.log`, so that vLLM's handlers print it."""

from __future__ import annotations

import ast
import logging

import pytest

from shim import process

FILES = sorted(process.PACKAGE.rglob("*.py"))
ALLOWED = {"process.py"}
MAKERS = {"getLogger", "init_logger", "basicConfig", "getChild"}
SPEAKERS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def foreign_loggers(source: str) -> list[str]:
    """Expressions that make a logger, or that log by the logging module itself or by a logger of vLLM's."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("logging", "vllm.logger"):
            found += [alias.name for alias in node.names if alias.name in MAKERS | SPEAKERS]
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            names = {"logging": MAKERS | SPEAKERS, "logger": MAKERS | SPEAKERS, "log": MAKERS}.get(owner, set())
            found += [ast.unparse(node)] * (node.attr in names)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(process.PACKAGE)))
def test_a_file_makes_no_logger(path):
    if path.relative_to(process.PACKAGE).as_posix() not in ALLOWED:
        assert foreign_loggers(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import logging\nlog = logging.getLogger(__name__)",
        "from logging import getLogger",
        "from vllm.logger import init_logger",
        "import logging\nlogging.warning('x')",
        "module.logger.info('x')",
        "child = process.log.getChild('x')",
    ],
)
def test_the_check_can_fail(source):
    assert len(foreign_loggers(source)) == 1


def test_the_check_lets_our_logger_and_types_pass():
    assert foreign_loggers("import logging\nfrom shim import process\nprocess.log.info('x')\nx: logging.Logger") == []


def test_vllms_handlers_print_what_we_log():
    assert process.log is logging.getLogger("vllm.glm5_shim")
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    vllm = logging.getLogger("vllm")
    vllm.addHandler(handler)
    try:
        process.log.warning("glm5-shim: %s", "here")
    finally:
        vllm.removeHandler(handler)
    assert lines == ["glm5-shim: here"]
