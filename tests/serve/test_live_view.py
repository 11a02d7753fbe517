"""The page in a browser: somebody types, tokens come in colours, the pictures and numbers follow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline import AsyncEngine
from tests.serve.browser import CHROMIUM, Browser
from tests.serve.client_env import node_client
from tests.serve.running import Running, running_server

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Iterator[Running]:
    with running_server(AsyncEngine(tiny_checkpoint, draft=None, block_size=4)) as running:
        yield running


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as opened:
        yield opened


def metric(server: Running, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_a_conversation_on_the_page(server: Running, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait_for("document.getElementById('about').textContent.includes('context')")
    browser.wait_for("pool !== null")
    free_before = browser.run("document.getElementById('pool').getAttribute('aria-label')")
    browser.run("document.getElementById('prompt').focus(); document.getElementById('max').value = 150")
    browser.call("Input.insertText", text="abcabcabcabcabc")
    enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
    browser.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **enter)
    browser.wait_for("messages.length === 2 && !running")
    answer = browser.run("messages[1].content")
    assert browser.run("document.querySelector('.message.assistant .words').textContent") == answer
    kinds = set(browser.run("[...document.querySelectorAll('.words span')].map(span => span.dataset.origin)"))
    assert {"suffix", "bonus"} <= kinds
    assert "tokens/s" in browser.run("document.querySelector('.message.assistant .facts').textContent")

    # A step arrives with the next picture of the pool; then page and metrics agree.
    num_accepted = metric(server, "spec_decode_num_accepted_tokens_total")
    assert num_accepted > 0
    browser.wait_for(f"sum(steps, 'accepted') === {num_accepted:.0f}")
    assert browser.run("sum(steps, 'drafted')") == metric(server, "spec_decode_num_draft_tokens_total")
    assert browser.run("sum(steps, 'accepted') + steps.length") == metric(server, "generation_tokens_total")
    browser.wait_for("pool.owners.some(owner => owner.name === 'session:' + session)")
    assert browser.run("document.getElementById('pool').getAttribute('aria-label')") != free_before

    browser.run("document.getElementById('spec').checked = false")
    browser.run("document.getElementById('prompt').value = 'xyz'; document.getElementById('form').requestSubmit()")
    browser.wait_for("messages.length === 4 && !running")
    assert metric(server, "spec_decode_num_accepted_tokens_total") == num_accepted

    browser.run("document.getElementById('reset').click()")
    browser.wait_for("!document.querySelector('.message') && pool.owners.length === 0")
    assert browser.errors == []


def test_every_control_has_a_name_and_errors_are_shown(server: Running, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait_for("document.getElementById('about').textContent.includes('context')")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    controls = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node.get("ignored")
        and node["role"]["value"] in ("button", "textbox", "checkbox", "spinbutton", "image", "log")
    ]
    assert len(controls) >= 10
    assert all(name for _, name in controls), controls
    browser.run("document.getElementById('prompt').value = 'a'.repeat(600)")
    browser.run("document.getElementById('form').requestSubmit()")
    browser.wait_for("document.getElementById('trouble').textContent.includes('shorten the prompt')")
    assert browser.run("document.getElementById('prompt').value.length") == 600  # nothing typed is lost


AXE = ("axe-core@4.14.1",)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(server: Running, browser: Browser, scheme: str) -> None:
    axe = node_client("axe", *AXE) / "node_modules/axe-core/axe.min.js"
    still = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.call("Emulation.setEmulatedMedia", features=still)
    browser.open(server.url)
    browser.wait_for("document.getElementById('about').textContent.includes('context') && pool !== null")
    browser.run(axe.read_text(encoding="utf-8"))
    assert _faults(browser) == []  # before anything was said

    browser.run("document.getElementById('max').value = 60")
    browser.run("document.getElementById('prompt').value = 'abc\\n'.repeat(30)")  # it scrolls
    browser.run("document.getElementById('form').requestSubmit()")
    browser.wait_for("messages.length === 2 && !running && pool.owners.length > 0")
    browser.run(  # one token of each colour, an error, and the question for a key
        "document.querySelector('.assistant .words').innerHTML += "
        "Object.keys(ORIGINS).map(name => `<span class=o-${name}>abc</span>`).join(' ')"
    )
    browser.run("document.getElementById('trouble').textContent = 'it went wrong'")
    browser.run("document.getElementById('keyline').hidden = false")
    assert _faults(browser) == []
    assert browser.errors == []


def _faults(browser: Browser) -> list[str]:
    """What axe calls serious or critical, by rule and place."""
    return list(
        browser.run(
            """axe.run(document).then(({ violations }) => violations
                .filter(one => one.impact === "serious" || one.impact === "critical")
                .flatMap(one => one.nodes.map(node => `${one.id}: ${node.target} ${node.failureSummary}`)))"""
        )
    )
