"""The page's tasks to learn by, and the doors that it opens on."""

from __future__ import annotations

from typing import Any

from driving import NEEDS_CHROMIUM, settled

pytestmark = NEEDS_CHROMIUM


def test_the_page_takes_a_task_from_its_door_to_solved(opened: Any) -> None:
    page = opened("")
    page.locator("[data-door=learn]").click()
    page.locator("[data-task=the-vocabulary]").click()
    page.get_by_text("14.0 GiB (≤ 3 GiB)").wait_for()
    page.get_by_role("button", name="A hint").click()
    page.get_by_role("button", name="One answer").click()
    page.locator("#flag-micro-batch-number").fill("1")
    page.keyboard.press("Enter")
    page.get_by_text("back to Micro-batch 2").wait_for()
    page.get_by_role("button", name="Try it").click()
    page.get_by_text("Solved.").wait_for()
    page.get_by_role("button", name="The formula").click()
    page.locator("#drawer pre.formula").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="All tasks").click()
    assert page.locator("#panel-learn li.done").count() == 1


def test_the_page_opens_on_three_doors(opened: Any) -> None:
    page = opened("")
    assert page.locator("#origin .door strong").all_inner_texts() == ["One card", "One node", "A cluster", "Learn"]
    assert page.locator("[data-door=cluster]").get_attribute("aria-pressed") == "true"
    settled(page, lambda: page.locator("[data-door=card]").click())
    assert "A sample: llama-3.1-8b · 1 × rtx4090" in page.locator("#origin").inner_text()
    page.locator("#flag-seq-len-number").fill("1024")
    settled(page, lambda: page.keyboard.press("Enter"))
    assert page.locator("#origin").is_hidden()
