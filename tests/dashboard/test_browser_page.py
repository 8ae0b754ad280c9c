"""The page in a real Chromium: what it shows, how it is used, and that pages of other origins cannot read it."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect

from averaging.dashboard import CurvePoint, DashboardServer
from averaging.receipts import Outcome
from tests.dashboard.dashboards import ENDPOINTS, NOW, FakeRun, peer, receipt, view

pytestmark = [pytest.mark.browser, pytest.mark.asyncio]

CHROMIUM = "/usr/bin/chromium"
EVIL = "evil.example"


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    """Chromium, which takes the name of another site for this machine, as after DNS rebinding."""
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox", f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"]
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        await chromium.close()


@asynccontextmanager
async def opened(
    browser: Browser, url: str, complaints: list[str] | None = None, **options: Any
) -> AsyncIterator[Page]:
    """Yields the page. It must not write errors to the console."""
    seen: list[str] = []
    context = await browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "locale": "en-GB"} | options)
    page = await context.new_page()

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            seen.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: seen.append(str(error)))
    await page.goto(url)
    yield page
    await context.close()
    if complaints is None:
        assert seen == []
    else:
        complaints += seen


def busy(lost: str = ENDPOINTS[2]) -> FakeRun:
    """A run with a round in which all were there, one in which a member was lost, and one without a group."""
    run = FakeRun(
        view(peer(ENDPOINTS[0]), peer(ENDPOINTS[1], rate=9.0, lanes=["grpc"]), peer(lost, error="connection refused"))
    )
    history_views = run.views

    async def views(history: Any) -> AsyncGenerator[dict[str, Any], None]:
        for name in ENDPOINTS:
            history.add_receipt(name, receipt(name, 1), NOW)
            if name != lost:
                history.add_receipt(name, receipt(name, 2, lost=lost), NOW)
        alone = receipt(ENDPOINTS[0], 3, outcome=Outcome.NO_GROUP, members=(), accounts=(), reason="nobody came")
        history.add_receipt(ENDPOINTS[0], replace(alone, group_id=b""), NOW)
        for second in range(0, 100, 2):
            history.add_point(CurvePoint(NOW - 100 + second, 1e6, 2e6, {ENDPOINTS[0]: 3.0, ENDPOINTS[1]: 9.0}))
        async for each in history_views(history):
            yield each

    run.views = views  # type: ignore[method-assign]
    return run


async def names(page: Page) -> list[str]:
    texts: list[str] = await page.locator("#peer-rows .link").all_inner_texts()
    return texts


async def test_peers_rounds_and_the_graph_are_shown(browser: Browser) -> None:
    async with DashboardServer(busy().views) as server, opened(browser, server.url) as page:
        await expect(page.locator("#connection-text")).to_have_text("live")
        await expect(page).to_have_title("(1 silent) run · 2 peers")
        assert await names(page) == [*ENDPOINTS]
        down = page.locator("#peer-rows tr.down")
        await expect(down).to_contain_text("does not answer: connection refused")
        await expect(page.locator("#round-list li")).to_have_count(3)
        await expect(page.locator("#round-list li").first).to_contain_text("no group")
        await expect(page.locator("#round-list")).to_contain_text(f"{ENDPOINTS[2]} dropped, sent nothing for 4.1 s")
        await page.check("#faults")
        await expect(page.locator("#round-list li")).to_have_count(2)
        label = await page.locator("#timeline").get_attribute("aria-label")
        assert label == "Timeline of 3 rounds of 3 peers, 2 with a fault"
        await expect(page.locator("#graph g[tabindex]")).to_have_count(3)
        await expect(page.locator("#graph path.direct")).to_have_count(4)  # two members have sent receipts
        await page.click("#graph-details summary")
        await expect(page.locator("#graph-table tbody tr")).to_have_count(4)
        assert "sent 2.0 MiB/s" in (await page.locator("#bytes").get_attribute("aria-label") or "").replace(
            "1.9", "2.0"
        )


async def test_the_table_sorts_filters_and_keeps_the_focus(browser: Browser) -> None:
    run = FakeRun(view(*(peer(name, rate=rate) for name, rate in zip(ENDPOINTS, (2.0, None, 10.0), strict=True))))
    async with DashboardServer(run.views) as server, opened(browser, server.url) as page:
        speed = page.locator("th", has_text="Speed")
        await speed.locator("button").click()
        assert await speed.get_attribute("aria-sort") == "ascending"
        assert await names(page) == [ENDPOINTS[0], ENDPOINTS[2], ENDPOINTS[1]]  # what is not known stands last
        await page.keyboard.press("Enter")
        assert await speed.get_attribute("aria-sort") == "descending"
        assert await names(page) == [ENDPOINTS[2], ENDPOINTS[0], ENDPOINTS[1]]
        await page.locator("#peer-rows .link", has_text=ENDPOINTS[0]).focus()
        run.send(view(*(peer(name, rate=rate) for name, rate in zip(ENDPOINTS, (20.0, None, 10.0), strict=True))))
        await expect(page.locator("#peer-rows .link").first).to_have_text(ENDPOINTS[0])
        await page.fill("#filter", "0.3:")
        assert await names(page) == [ENDPOINTS[2]]
        await expect(page.locator("#shown")).to_have_text("1 of 3 peers")


async def test_receipts_open_with_the_keyboard_and_from_the_timeline(browser: Browser) -> None:
    async with DashboardServer(busy().views) as server, opened(browser, server.url) as page:
        await page.locator("#round-list .link", has_text="dropped").focus()
        await page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Receipts of round 2")
        await expect(dialog).to_contain_text(
            f"2 of 3 in 3.00 s (all-reduce 2.00 s); {ENDPOINTS[2]} dropped, sent nothing"
        )
        await expect(dialog).to_contain_text(f"No receipt is known of {ENDPOINTS[2]}.")
        await expect(dialog.locator("h3")).to_have_text([ENDPOINTS[0], ENDPOINTS[1]])
        await page.keyboard.press("Escape")
        await expect(dialog).not_to_be_visible()
        box = await page.locator("#timeline").bounding_box()
        assert box is not None
        # The first round began 90 s before the end of the span of 300 s, at the first row.
        x = 172 + (1 - 89 / 300) * (box["width"] - 172)
        await page.locator("#timeline").hover(position={"x": x, "y": 10})
        await expect(page.locator("#tip")).to_contain_text("round 1: averaged in 3.00 s")
        await page.locator("#timeline").click(position={"x": x, "y": 10})
        await expect(page.get_by_role("dialog", name="Receipts of round 1")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.locator("#peer-rows .link").first.click()
        await expect(page.get_by_role("dialog", name=ENDPOINTS[0])).to_contain_text("averaging 0.2.0")


async def test_texts_of_peers_never_become_html(browser: Browser) -> None:
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    accounts = tuple(replace(each, lane_reason=attack, mode=attack) for each in receipt().accounts)
    run = FakeRun(
        view(
            peer(attack, strategy=attack, doing=attack, software=attack, lanes=[attack], waits_for=[attack]),
            run_id=attack,
        )
    )

    async def views(history: Any) -> AsyncGenerator[dict[str, Any], None]:
        history.add_receipt(
            attack, receipt(attack, 1, topic=attack, members=(attack, "b", "c"), accounts=accounts), NOW
        )
        history.add_receipt(attack, receipt(attack, 2, lost=attack), NOW)
        async for each in run.views(history):
            yield each

    async with DashboardServer(views) as server, opened(browser, server.url) as page:
        page.on("dialog", lambda _: pytest.fail("a script of a peer ran"))
        await expect(page.locator("#run-id")).to_have_text(attack)
        await page.locator("#round-list .link").first.click()
        await expect(page.locator("#detail-body")).to_contain_text("<img src=x")
        await page.keyboard.press("Escape")
        await page.locator("#peer-rows .link").first.click()
        await expect(page.locator("#detail-title")).to_have_text(attack)
        assert await page.locator("img, script:not([src='page.js'])").count() == 0


async def test_a_lost_connection_is_shown_and_tried_again(browser: Browser) -> None:
    complaints: list[str] = []
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(DashboardServer(FakeRun().views))
        listen = re.sub(r"^http://|/$", "", first.url)
        async with opened(browser, first.url, complaints) as page:
            await expect(page.locator("#connection-text")).to_have_text("live")
            await stack.aclose()
            await expect(page.locator("#connection")).to_contain_text(
                "the connection to the dashboard is lost; next attempt in"
            )
            assert await names(page) == [*ENDPOINTS]
            async with DashboardServer(FakeRun(view(peer("10.0.0.9:1"))).views, listen=listen):
                await page.click("#retry")
                await expect(page.locator("#connection-text")).to_have_text("live")
                await expect(page.locator("#retry")).not_to_be_visible()
                assert await names(page) == ["10.0.0.9:1"]
    assert all("ERR_" in each for each in complaints)  # the browser's own, of the lost connection


READ = """
async (url) => {
  const found = [];
  for (const path of ["state", "events", "", "page.js", "rounds/1"]) {
    for (const mode of ["cors", "no-cors"]) {
      try { found.push(await (await fetch(url + path, { mode, credentials: "include" })).text()); }
      catch (error) { found.push(""); }
    }
  }
  found.push(await new Promise((done) => {
    const source = new EventSource(url + "events", { withCredentials: true });
    source.addEventListener("update", (event) => done(event.data));
    source.onerror = () => { source.close(); done(""); };
  }));
  const frame = document.createElement("iframe");
  const loaded = new Promise((done) => { frame.onload = done; });
  frame.src = url;
  document.body.append(frame);
  await loaded;
  try { found.push(frame.contentDocument?.body?.innerText ?? ""); } catch (error) { found.push(""); }
  return found.join("");
}
"""


async def test_pages_of_other_origins_cannot_read_it(browser: Browser) -> None:
    complaints: list[str] = []
    async with DashboardServer(FakeRun().views) as server, another_site() as port:
        for site in (f"http://127.0.0.1:{port}/", f"http://localhost:{port}/", f"http://{EVIL}:{port}/"):
            async with opened(browser, site, complaints) as page:
                assert await page.evaluate("document.title") == "another site"
                assert await page.evaluate(READ, server.url) == ""
                assert await page.evaluate(READ, server.url.replace("127.0.0.1", "localhost")) == ""
    assert complaints


async def test_a_page_whose_name_is_pointed_here_cannot_read_it(browser: Browser) -> None:
    """DNS rebinding: to the browser, the page of the other site and this server are one origin."""
    complaints: list[str] = []
    async with DashboardServer(FakeRun().views) as server:
        url = server.url.replace("127.0.0.1", EVIL)
        async with opened(browser, url, complaints) as page:
            text = await page.inner_text("body")
            assert "is no known name of this server" in text
            read = "async (url) => (await fetch(url)).status"
            for path in ("state", "events", "page.js"):
                assert await page.evaluate(read, url + path) == 403


@asynccontextmanager
async def another_site() -> AsyncIterator[int]:
    """Yields the port of a site with a page of its own."""
    body = b"<!doctype html><title>another site</title><body></body>"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
