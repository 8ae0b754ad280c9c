"""A real run of four training processes in a real browser, one of which is killed. Pictures of it: runs/dashboard/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.pages import ROOT
from tests.support.processes import JsonProcess, averaging_process

pytestmark = pytest.mark.browser

CHROMIUM = "/usr/bin/chromium"
PICTURES = ROOT / "runs" / "dashboard"
WAIT = 60_000
"""Milliseconds for what the run has to bring about."""

TRAIN = """
import json, sys, time, torch
from averaging import DecentralizedAverager, LocalSGD
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
options = {"run_id": "demo", "group_size": 4, "join": sys.argv[1:], "round_timeout": 10.0}
with DecentralizedAverager(optimizer, model=model, strategy=LocalSGD(sync_every=40), **options) as opt:
    print(json.dumps({"event": "ready", "endpoint": opt.endpoint}), flush=True)
    while True:
        opt.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        opt.step()
        time.sleep(0.05)
"""


@pytest.fixture
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser: Browser, url: str, width: int, scheme: str, complaints: list[str]) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    return page


@pytest.mark.timeout(300)
def test_a_run_of_four_of_which_one_is_killed(browser: Browser) -> None:
    complaints: list[str] = []
    with ExitStack() as stack:
        first = stack.enter_context(JsonProcess("python", "-c", TRAIN))
        seed = first.expect("ready")["endpoint"]
        others = [stack.enter_context(JsonProcess("python", "-c", TRAIN, seed)) for _ in range(3)]
        endpoints = [seed, *(each.expect("ready")["endpoint"] for each in others)]
        dashboard = stack.enter_context(averaging_process("dashboard", "--join", seed, "--listen", "127.0.0.1:0"))
        ready = dashboard.expect("ready")
        assert ready["readers"] == "for users of this machine, without a password"
        page = opened(browser, ready["url"], 1280, "light", complaints)
        expect(page.locator("#run-id")).to_have_text("demo", timeout=WAIT)
        expect(page.locator("#peer-rows tr")).to_have_count(4, timeout=WAIT)
        expect(page.locator("#peer-rows")).to_contain_text("LocalSGD")
        whole = page.locator("#round-list li", has_text=re.compile(r"4 of 4 in .*all 4 agree"))
        expect(whole.first).to_be_visible(timeout=WAIT)
        expect(page.locator("#graph g[tabindex]")).to_have_count(4)

        others[-1].kill()
        down = page.locator("#peer-rows tr.down")
        expect(down).to_contain_text("does not answer", timeout=WAIT)
        expect(down).to_contain_text(endpoints[-1])
        expect(page).to_have_title("(1 silent) demo · 3 peers")
        expect(page.locator("#rate")).to_have_attribute("aria-label", re.compile(f"now .*{re.escape(seed)} [1-9]"))
        after = page.locator("#round-list li", has_text=re.compile(r"3 of [34] in .*all 3 agree"))
        expect(after.first).to_be_visible(timeout=WAIT)
        after.first.locator("button").click()
        expect(page.locator("#detail h3")).to_have_count(3)
        page.keyboard.press("Escape")

        PICTURES.mkdir(parents=True, exist_ok=True)
        for width in (1280, 400):
            for scheme in ("light", "dark"):
                pictured = opened(browser, ready["url"], width, scheme, complaints)
                expect(pictured.locator("#graph g[tabindex]").first).to_be_visible(timeout=WAIT)
                assert pictured.evaluate("document.documentElement.scrollWidth") == width
                pictured.screenshot(path=PICTURES / f"{width}-{scheme}.png", full_page=True)
        first.kill()  # the peer that was given: the others are known without it
        expect(page.locator("#peer-rows tr.down", has_text=seed)).to_contain_text("does not answer", timeout=WAIT)
        alive = page.locator("#peer-rows tr:not(.down)")
        expect(alive).to_have_count(2)
        assert complaints == []
