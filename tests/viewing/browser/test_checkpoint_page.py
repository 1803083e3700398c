"""The page of a checkpoint in a browser: its map, search and panel, by mouse and by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hfshard.viewing.page.checkpoint_page import make_checkpoint_page
from hfshard.viewing.page.page import render_page
from hfshard.viewing.results import Inspection
from tests.viewing.page.checkpoints import hostile_checkpoint, inspection_of, large_page, small_checkpoint, tensor

if TYPE_CHECKING:
    from playwright.sync_api import Page

MOST_ELEMENTS = 6_000
CHOOSE_ALL = """() => {
  const options = document.querySelectorAll("[role=option]");
  for (const option of options) {
    document.querySelector("#search").focus();
    option.click();
  }
  return options.length;
}"""


def open_page(browser_page: Page, found: Inspection, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_page(make_checkpoint_page(found)), encoding="utf-8")
    browser_page.goto(path.as_uri())


def crumbs(page: Page) -> str:
    return page.locator("#crumbs").inner_text().replace("\n", " ")


def details(page: Page) -> str:
    return page.locator("#details").inner_text().replace("\n", " ")


def focused(page: Page) -> str:
    label: str = page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.id")
    return label


def test_mouse_goes_in_and_out(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    open_page(page, small_checkpoint(), tmp_path)
    assert crumbs(page) == "all 102.4 KB · 100.0 %"
    assert page.locator("#treemap > button").count() == 1  # the tied head has no bytes of its own

    page.locator("#treemap > button").click(position={"x": 20, "y": 8})
    assert crumbs(page) == "all › model 102.4 KB · 100.0 %"
    page.get_by_role("button", name="model.layers, 24 tensors, 62.4 KB").click(position={"x": 20, "y": 8})
    assert crumbs(page) == "all › model › layers 62.4 KB · 60.9 %"
    page.get_by_role("button", name="model.layers.3, 2 tensors, 5.2 KB").click(position={"x": 20, "y": 8})
    page.get_by_role("button", name="model.layers.3.attn.weight, F32 20 × 30, 2.4 KB").click()
    assert details(page) == (
        "model.layers.3.attn.weight dtype F32 shape 20 × 30 file model-00002-of-00002.safetensors "
        "parameters 600 size 2.4 KB · 2.3 %"
    )
    page.locator("#crumbs button", has_text="model").click()
    assert crumbs(page) == "all › model 102.4 KB · 100.0 %"

    page.locator("#treemap > button").first.hover()
    page.locator("#tip").wait_for(state="visible")
    page.locator("h1").hover()
    page.locator("#tip").wait_for(state="hidden")


def test_keyboard_alone_does_everything(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    open_page(page, small_checkpoint(), tmp_path)
    for _ in range(20):
        page.keyboard.press("Tab")
        if focused(page).startswith("model,"):
            break
    page.keyboard.press("Enter")
    assert focused(page) == "model.layers, 24 tensors, 62.4 KB"
    page.keyboard.press("ArrowRight")
    assert focused(page) == "model.embed.weight, F32 100 × 100, 40.0 KB"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    assert focused(page) == "model.layers.0, 2 tensors, 5.2 KB"
    page.keyboard.press("ArrowRight")  # layers stand in rows, in their order
    assert focused(page) == "model.layers.1, 2 tensors, 5.2 KB"
    assert details(page).startswith("model.layers.1 tensors 2 parameters 2,000")
    page.keyboard.press("Escape")
    assert (crumbs(page), focused(page)) == ("all › model 102.4 KB · 100.0 %", "model.layers, 24 tensors, 62.4 KB")
    page.keyboard.press("Home")
    assert crumbs(page) == "all 102.4 KB · 100.0 %"

    page.keyboard.press("/")
    assert focused(page) == "Search tensors by name"
    page.keyboard.type("LAYERS.1 attn")
    assert page.locator("#results .quiet").inner_text() == "3 names, 7.2 KB"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert crumbs(page) == "all 102.4 KB · 100.0 %"
    assert details(page).startswith("model.layers.10.attn.weight dtype F32 shape 20 × 30 ")
    assert page.locator("#announcer").inner_text() == "model.layers.10.attn.weight, F32 20 × 30, 2.4 KB"
    assert page.locator("#results").is_hidden()
    page.keyboard.press("Enter")  # the focus is on the part of the map that has it
    assert crumbs(page) == "all › model 102.4 KB · 100.0 %"


def test_search_leads_from_a_tied_name_to_what_is_stored(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    open_page(page, small_checkpoint(), tmp_path)

    page.fill("#search", "lm_head")
    page.locator("[role=option]").click()

    assert details(page).startswith("model.embed.weight dtype F32 shape 100 × 100 ")
    assert details(page).endswith("tied lm_head.weight")
    page.fill("#search", "no such tensor")
    assert page.locator("#results").inner_text() == "No such name"
    page.get_by_role("button", name="model.layers.0.mlp.weight").click()
    assert details(page).startswith("model.layers.0.mlp.weight dtype BF16 shape 35 × 40 ")
    assert crumbs(page) == "all 102.4 KB · 100.0 %"


def test_a_chosen_tensor_is_outlined_and_the_map_stays(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    open_page(page, small_checkpoint(), tmp_path)
    chosen = page.locator("#treemap .chosen")
    assert chosen.count() == 0
    cells = page.locator("#treemap .cell").count()

    page.locator("#treemap .label", has_text="embed.weight").click(force=True)

    assert (crumbs(page), page.locator("#treemap .cell").count()) == ("all 102.4 KB · 100.0 %", cells)
    assert chosen.inner_text() == "embed.weight"
    assert details(page).startswith("model.embed.weight dtype F32 shape 100 × 100 ")
    map_box, details_box = (page.locator(name).bounding_box() for name in ("#treemap", "#details"))
    assert map_box is not None and details_box is not None
    assert details_box["x"] >= map_box["x"] + map_box["width"]
    assert (
        map_box["y"] <= details_box["y"] < details_box["y"] + details_box["height"] <= map_box["y"] + map_box["height"]
    )

    page.set_viewport_size({"width": 800, "height": 800})  # drawn anew, and the details below
    page.wait_for_function("document.querySelector('#treemap').clientWidth < 800")
    assert chosen.inner_text() == "embed.weight"
    page.keyboard.press("Enter")
    assert (crumbs(page), chosen.count()) == ("all › model 102.4 KB · 100.0 %", 0)


def test_one_dtype_is_coloured_by_file(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    open_page(page, inspection_of([tensor("a", 10, file=files[0]), tensor("b", 20, file=files[1])]), tmp_path)
    assert page.locator("#legend").inner_text() == f"{files[0]} · 40 B\n{files[1]} · 80 B"
    assert page.locator("[aria-pressed=true]").inner_text() == "file"
    colours = "document.querySelectorAll('#treemap > button')"
    assert page.evaluate(f"new Set([...{colours}].map((cell) => cell.style.background)).size") == 2

    open_page(page, inspection_of([tensor("a", 10), tensor("b", 20)]), tmp_path)
    assert page.locator(".colours").is_hidden()


def test_layers_that_are_alike_are_drawn_alike(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    path = tmp_path / "page.html"
    path.write_text(large_page(20), encoding="utf-8")
    page.goto(path.as_uri())

    counts = page.evaluate("""() => {
      const layers = [...document.querySelectorAll("#treemap > button > .module")];
      return [layers.length, new Set(layers.map((layer) => layer.querySelectorAll(".cell").length)).size];
    }""")

    assert counts == [20, 1]
    assert page.locator("#treemap .label", has_text="333 parts").count() == 20


def test_labels_tell_names_with_the_same_end_apart(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    kinds = ("attention.output.dense", "output.dense", "intermediate.dense", "attention.self.query")
    names = [f"encoder.layer.{layer}.{kind}.weight" for layer in range(6) for kind in kinds]
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        open_page(page, inspection_of([tensor(name, 100, 100) for name in names]), tmp_path)

        labels, least = page.evaluate("""() => {
          const labels = [...document.querySelectorAll("#treemap .tensor > .label")];
          const sizes = labels.map((label) => parseFloat(getComputedStyle(label).fontSize));
          const own = (cell) => cell.querySelector(":scope > .label")?.textContent ?? "";
          const path = (cell) => (cell ? `${path(cell.parentElement.closest(".cell"))}.${own(cell)}` : "");
          return [labels.map((label) => path(label.parentElement)), Math.min(...sizes)];
        }""")

        assert (len(labels), len(set(labels)), least) == (24, 24, 12), labels


def test_a_word_has_one_form_in_the_labels_of_siblings(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    kinds = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    names = [f"encoder.layer.{layer}.{kind}.weight" for layer in range(6) for kind in kinds]
    wide = [f"encoder.layer.{layer}.{kind}.dense.weight" for layer in range(6) for kind in ("intermediate", "output")]
    tensors = [tensor(name, 384, 1536) for name in wide] + [tensor(name, 384, 384) for name in names]
    found = inspection_of([tensor("embeddings.word.weight", 30_522, 384), *tensors])
    for width in (1180, 1100):
        page.set_viewport_size({"width": width, "height": 844})
        open_page(page, found, tmp_path)

        labels = page.locator("#treemap .tensor > .label").all_inner_texts()

        split = [label.split(".") for label in labels if label.startswith("a")]
        assert (len(split), {parts[-1] for parts in split}) == (24, {"query", "key", "value", "dense"})
        assert {parts[0] for parts in split} in ({"attention"}, {"atte"}, {"att"}, {"a"})
        assert sum(label.startswith("output.dense") for label in labels) == 6  # not a sibling of theirs


def test_colours_are_by_dtype_or_file_in_light_and_dark(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    open_page(page, small_checkpoint(), tmp_path)
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.locator("#legend").inner_text() == "F32 · 68.8 KB\nBF16 · 33.6 KB"

    page.click("[data-colour=file]")
    assert page.locator("#legend").inner_text().split(" · ")[0] == "model-00001-of-00002.safetensors"
    assert page.evaluate(ground) == "rgb(250, 250, 248)"
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(ground) == "rgb(22, 24, 27)"
    page.get_by_role("button", name="Light").click()
    assert page.evaluate(ground) == "rgb(250, 250, 248)"


def test_one_file_of_one_dtype_is_coloured_by_the_parts_of_the_model(browser_page: Page, tmp_path: Path) -> None:
    names = ["embed.weight", "h.0.attn.q.weight", "h.1.attn.q.weight", "h.0.mlp.up.weight", "h.1.mlp.up.weight"]
    open_page(browser_page, inspection_of([tensor(name, 10) for name in names]), tmp_path)

    assert browser_page.locator("#legend").inner_text() == "embeddings · 40 B\nattention · 80 B\nMLP · 80 B"
    assert browser_page.locator("[data-colour]:visible").count() == 0
    colours = "all => new Set(all.map((one) => one.style.background)).size"
    assert browser_page.locator(".cell.tensor").evaluate_all(colours) == 3


def test_hostile_names_do_nothing_but_stand_there(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    open_page(page, hostile_checkpoint(), tmp_path)
    assert page.title() == "</title><script>window.attacked=1</script>"

    page.fill("#search", "a")
    page.locator("[role=option]").first.click()
    assert page.evaluate(CHOOSE_ALL) == 26
    for _ in range(3):
        page.locator("#treemap > button").last.click()

    assert page.evaluate("window.attacked") is None
    assert page.evaluate("({}).attacked") is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("script").count() == 2


def test_a_hundred_thousand_tensors_are_searched_and_shown(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    path = tmp_path / "page.html"
    path.write_text(large_page(100), encoding="utf-8")
    page.goto(path.as_uri())
    assert page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS

    page.fill("#search", "layers.12. experts.332 up_proj")
    assert page.locator("#results .quiet").inner_text() == "1 name, 29.4 MB"
    page.keyboard.press("Enter")

    assert crumbs(page).startswith("all › model.layers › 12 › mlp.experts › 332 ")
    assert focused(page) == "model.layers.12.mlp.experts.332.up_proj.weight, BF16 7168 × 2048, 29.4 MB"
    assert page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS


def test_many_small_tensors_are_reached_by_what_is_left_over(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    open_page(page, inspection_of([tensor(f"t{number}", 1000) for number in range(8_000)]), tmp_path)
    assert page.locator("#treemap > button").last.get_attribute("aria-label") == "7,250 more"

    page.locator("#treemap > button").last.click()
    assert crumbs(page) == "all › 7,250 more 29.0 MB · 90.6 %"
    page.keyboard.press("Escape")
    assert crumbs(page) == "all 32.0 MB · 100.0 %"
    page.fill("#search", "t7999")
    page.keyboard.press("Enter")
    assert focused(page) == "t7999, F32 1000, 4.0 KB"

    page.set_viewport_size({"width": 390, "height": 844})  # where all are too small to be told apart
    page.locator("#crumbs button").first.click()
    page.locator("#treemap > button").last.click()
    assert crumbs(page) == "all › 7,800 more 31.2 MB · 97.5 %"
    assert focused(page) == "t200, F32 1000, 4.0 KB"


def test_a_phone_shows_all_without_scrolling_aside(browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    page.set_viewport_size({"width": 390, "height": 844})
    open_page(page, small_checkpoint(), tmp_path)

    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("#treemap").bounding_box()["width"] > 340  # type: ignore[index]
