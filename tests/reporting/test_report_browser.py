"""Tests of the report in a browser: Chromium without a window and without a network."""

import pytest

from greedynas.reporting.report import write_report
from tests.helpers import report_runs as runs

pytestmark = pytest.mark.usefixtures("one_thread")

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def report(photos, tmp_path_factory, one_thread):
    """Write the report of a run with all stages, whose names contain HTML wherever possible."""
    folder = runs.trained(tmp_path_factory.mktemp("browser") / "<u>run", photos)
    limit = {"macs": (["60K"], None)}
    runs.searched(folder, pool_init=False, **limit)
    runs.searched(folder, table=runs.latency_table(folder), **limit)
    runs.add_model(folder, "macs-60K", chosen=True, class_names=runs.HOSTILE, samples=16)
    runs.add_timm(folder, "<b>rival<br>", top1=0.82, class_names=runs.HOSTILE)
    return write_report(folder)


class Watched:
    """A page that records its errors and requests."""

    def __init__(self, browser, file, viewport, **context):
        self.problems = []
        self.context = browser.new_context(viewport=viewport, **context)
        self.context.route("**/*", self._ask)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message) or dialog.dismiss())
        self.file = file
        self.open()

    def open(self):
        self.page.goto(self.file.as_uri())
        self.page.wait_for_selector("html[data-drawn]", timeout=60_000)

    def _ask(self, route):
        if route.request.url == self.file.as_uri():
            route.continue_()
        else:
            self.problems.append(route.request.url)
            route.abort()

    def do(self, script, argument=None):
        return self.page.evaluate(script, argument)

    def close(self):
        self.context.close()


@pytest.fixture(scope="module")
def desktop(browser, report):
    watched = Watched(browser, report, DESKTOP, color_scheme="light")
    yield watched
    watched.close()


@pytest.fixture(scope="module")
def phone(browser, report):
    watched = Watched(browser, report, PHONE, color_scheme="dark", has_touch=True, is_mobile=True)
    yield watched
    watched.close()


@pytest.fixture(params=["desktop", "phone"])
def either(request):
    return request.getfixturevalue(request.param)


def plot(watched, name):
    place = watched.page.locator(f"#chart-{name}")
    place.scroll_into_view_if_needed()
    return place


def test_it_opens_without_errors_and_requests(either):
    assert either.problems == []
    assert either.page.locator("h1").inner_text().startswith("75.0% top-1 on test images")


def test_the_page_fits_the_width_of_the_screen(either):
    width = either.page.viewport_size["width"]
    assert either.do("document.documentElement.scrollWidth") == width
    for box in either.do(
        "[...document.querySelectorAll('.main-svg, img, h1, p')].map(e => e.getBoundingClientRect().right)"
    ):
        assert box <= width + 1


def test_every_chart_is_drawn(either):
    """Check that each trace has left visible elements inside the chart."""
    drawn = either.do(
        """[...document.querySelectorAll('[data-chart]')].map(place => ({
            name: place.dataset.chart,
            traces: place.data.filter(trace => trace.showlegend !== false || trace.hoverinfo !== 'skip').length,
            marks: place.querySelectorAll(
                '.scatterlayer .points path, .scatterlayer .js-line, .barlayer .point, .heatmaplayer image, .violinlayer .violin'
            ).length,
            width: place.querySelector('.main-svg').getBoundingClientRect().width,
        }))"""
    )
    assert {chart["name"] for chart in drawn} == {
        *(
            "per_class",
            "confusion",
            "models",
            "retraining",
            "front_macs",
            "accuracies",
            "generations",
            "ops",
            "latency",
        ),
        *("supernet_loss", "pool_steadiness", "filtering", "pool_losses"),
    }
    for chart in drawn:
        assert chart["marks"] >= chart["traces"] > 0, chart
        assert chart["width"] > 300, chart


def test_hovering_over_a_path_shows_its_architecture(desktop):
    front = plot(desktop, "front_macs")
    star = front.locator(".scatterlayer .trace").nth(2).locator(".point").first
    box = star.bounding_box()
    desktop.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = desktop.page.locator("#chart-front_macs .hoverlayer .hovertext")
    label.wait_for()
    hover = desktop.do("document.querySelector('#chart-front_macs .hoverlayer').textContent")
    assert "multiply-adds" in hover
    ops = desktop.do("document.querySelectorAll('[data-chart=front_macs]')[0].data[2].text[0]").split("<br>")[-2:]
    assert all(op in hover for stage in ops for op in stage.split())
    assert len(" ".join(ops).split()) == 4


def eventually(watched, count, locator):
    """Wait for a condition, because plotly waits for a second click before it handles the first."""
    for _ in range(100):
        if locator.count() == count:
            return
        watched.page.wait_for_timeout(50)
    raise AssertionError(f"{locator.count()} traces, not {count}")


def test_a_click_on_the_legend_hides_a_trace(desktop):
    front = plot(desktop, "front_macs")
    traces, toggle = front.locator(".scatterlayer .trace"), front.locator(".legendtoggle").first
    before = traces.count()
    toggle.click()
    eventually(desktop, before - 1, traces)
    desktop.page.locator("#theme").click()  # the choice is kept when the theme changes
    assert traces.count() == before - 1
    desktop.page.locator("#theme").click()
    toggle.click()
    eventually(desktop, before, traces)


def colours(watched):
    return watched.do(
        """() => ({
            page: getComputedStyle(document.body).backgroundColor,
            tick: getComputedStyle(document.querySelector('#chart-front_macs .xtick text')).fill,
            trace: document.querySelector('#chart-per_class').data[0].marker.color,
            drawing: getComputedStyle(document.querySelector('.drawing text')).fill,
        })"""
    )


def brightness(colour):
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


def test_themes(desktop, phone):
    light, dark = colours(desktop), colours(phone)  # as the system prefers
    assert brightness(light["page"]) > 600 > 300 > brightness(dark["page"])
    for part in ("tick", "drawing"):
        assert brightness(light[part]) < 350 < 400 < brightness(dark[part])
    assert light["trace"] != dark["trace"]
    button = desktop.page.locator("#theme")
    assert button.inner_text() == "Dark theme"
    button.click()
    assert colours(desktop) == dark
    assert button.inner_text() == "Light theme"
    desktop.open()
    assert colours(desktop) == dark  # remembered
    desktop.page.locator("#theme").click()
    assert colours(desktop) == light
    assert desktop.problems == []


def test_without_storage(browser, report):
    watched = Watched.__new__(Watched)
    watched.problems, watched.file = [], report
    watched.context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    watched.context.add_init_script(
        "Object.defineProperty(window, 'localStorage', {get() { throw new Error('blocked'); }})"
    )
    watched.page = watched.context.new_page()
    watched.page.on("pageerror", lambda error: watched.problems.append(str(error)))
    watched.open()
    watched.page.locator("#theme").click()
    assert brightness(colours(watched)["page"]) < 300
    assert watched.problems == []
    watched.close()


def test_hostile_names_are_shown_literally(either):
    plot(either, "confusion")
    ticks = either.do("[...document.querySelectorAll('#chart-confusion .ytick text')].map(tick => tick.textContent)")
    assert ticks == [name if len(name) <= 18 else name[:17] + "…" for name in runs.HOSTILE]
    assert either.do("document.querySelectorAll('#chart-confusion .ytick a, .ytick tspan[style*=bold]').length") == 0
    for chart in ("models", "retraining"):
        assert "<b>rival<br>" in either.page.locator(f"#chart-{chart} .legendtext").all_text_contents()
    captions = " ".join(either.page.locator(".sample").all_inner_texts())
    assert all(" ".join(name.split()) in " ".join(captions.split()) for name in runs.HOSTILE)
    assert either.page.locator(".run").inner_text().endswith("<u>run")
    assert either.problems == []


def test_hostile_names_in_hover(desktop):
    box = plot(desktop, "confusion").locator(".heatmaplayer image").bounding_box()
    desktop.page.mouse.move(box["x"] + box["width"] / 16, box["y"] + box["height"] / 16)  # the first of eight classes
    desktop.page.locator("#chart-confusion .hoverlayer .hovertext").wait_for()
    hover = desktop.do("document.querySelector('#chart-confusion .hoverlayer').textContent")
    assert f"{runs.HOSTILE[0]}, correct" in hover
    assert desktop.problems == []


def test_touching_a_chart_scrolls_the_page(desktop, phone):
    mode = "document.querySelector('#chart-front_macs')._fullLayout.dragmode"
    assert phone.do(mode) is False
    assert desktop.do(mode) == "zoom"


def test_the_printed_page_is_light_and_narrow(phone):
    phone.do("dispatchEvent(new Event('beforeprint'))")
    assert brightness(colours(phone)["page"]) > 600
    assert phone.do("document.querySelector('#chart-front_macs .main-svg').getBoundingClientRect().width") == 680
    assert phone.do("[...document.querySelectorAll('details')].every(part => part.open)")
    phone.do("dispatchEvent(new Event('afterprint'))")
    assert brightness(colours(phone)["page"]) < 300
    assert phone.do("document.querySelector('#chart-front_macs .main-svg').getBoundingClientRect().width") < 390


def test_short_names_of_networks_stay_in_one_line(desktop):
    lines = desktop.do(
        """[...document.querySelectorAll('tbody th bdi.short')].map(
            name => name.getClientRects().length && name.offsetHeight / parseFloat(getComputedStyle(name).lineHeight))"""
    )
    assert lines
    assert max(lines) < 1.5


def test_the_end_of_training_is_not_marked_inside_the_legend(desktop):
    places = desktop.do(
        """(() => { const chart = document.querySelector('#chart-pool_steadiness');
            const mark = [...chart.querySelectorAll('.annotation-text')].find(one => one.textContent.startsWith('stopped'));
            const plot = chart.querySelector('.plotbg, .bglayer rect, .xy .gridlayer');
            return [mark.getBoundingClientRect().top, chart.querySelector('.legend').getBoundingClientRect().bottom]; })()"""
    )
    assert places[0] > places[1] + 8


def test_prints_break_no_row_of_images_and_no_heading_from_its_section(desktop):
    desktop.page.emulate_media(media="print")
    how = "name => getComputedStyle(document.querySelector(name))"
    assert desktop.do(f"({how})('.samples').breakInside") == "avoid"
    assert desktop.do(f"({how})('h2 + p').breakAfter") == "avoid"
    assert desktop.do(f"({how})('h2 + p').breakInside") == "avoid"
    desktop.page.emulate_media(media="screen")
