"""Rows that backward asks for, where no line of the program does: what forward knew of them, or the line that must state them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import loadgauge
from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.pytorch.capture.capture import capture_at
from loadgauge.pytorch.capture.inputs.inputs import special_tokens
from loadgauge.pytorch.capture.inputs.tokens import count_tokens
from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.device.read import of_program
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device
from loadgauge.pytorch.record.observe import BACKWARD, observing
from small_models import small_config

WIDTH = 16
FILE = Path(__file__).name


class Chooses(nn.Module):
    """Puts one row where numbers are positive, and works on the rows that are: plainly, or in a region that is computed again."""

    again = False

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.row = nn.Parameter(torch.zeros(WIDTH))

    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x).clone()
        y[x[:, 0] > 0] = self.row
        return self.head(y[torch.where(x[:, 0] > 0)[0]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.chosen, x, use_reentrant=False) if self.again else self.chosen(x)
        return y.square().mean()


class ChoosesAgain(Chooses):
    again = True


def line_of(text: str) -> str:
    lines, first = inspect.getsourcelines(Chooses.chosen)
    return f"{FILE}:{next(first + place for place, line in enumerate(lines) if text in line)}"


PUT, WHERE = line_of("self.row"), line_of("where")


def inputs(b: int) -> torch.Tensor:
    return torch.empty(b, WIDTH)


def real_flops(kind: type[nn.Module], rows: int, of: int) -> int:
    x = torch.full((of, WIDTH), -1.0)
    x[:rows] = 1
    with FlopCounterMode(display=False) as counter:
        kind()(x).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", [Chooses, ChoosesAgain])
def test_what_forward_was_told_holds_in_backward_and_in_recomputation(kind: type[nn.Module]) -> None:
    found = loadgauge.capture(kind, inputs, rows={PUT: 12, WHERE: 12}, optimizer="sgd").at(b=40)
    assert found.flops(b=40) == real_flops(kind, 12, 40)


def test_a_row_put_at_places_that_nobody_counted_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=rf"depends on values .*{PUT}.*--rows"):
        loadgauge.capture(Chooses, inputs, optimizer="sgd").at(b=40)


def test_other_rows_each_time_are_refused_where_they_are_computed_again() -> None:
    job = loadgauge.capture(ChoosesAgain, inputs, rows={PUT: 12, WHERE: [12, 11]}, optimizer="sgd").job
    with pytest.raises(NotModelled, match=rf"{WHERE} selects other rows each time"):
        capture_at(job, "own", {"b": 40})


def test_what_stops_an_operation_of_backward_is_raised_and_does_not_end_the_process() -> None:
    place = simulated_device()
    with fake_tensors(), observing(place) as observer:

        def stop(func: Any, *_: Any) -> None:
            if observer.phase == BACKWARD and "mm" in func._schema.name:
                raise NotModelled("not this product")

        observer.tracker.watchers.append(stop)
        layer = nn.Linear(8, 8, device=place)
        loss = layer(torch.empty(4, 8, device=place, requires_grad=True)).sum()
        with pytest.raises(NotModelled, match="not this product"):
            loss.backward()


def test_a_mask_and_where_it_is_not_true_are_together_as_many_as_there_are() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = x[:, 0] > 0
            return self.head(torch.cat([x, x])[torch.cat([mask, ~mask])]).mean()

    found = loadgauge.capture(Sorted, inputs, optimizer="sgd").at(b=40)
    assert not found.plain
    assert found.flops(b=50) == real_flops(Sorted, 21, 50) == real_flops(Sorted, 3, 50)


LOOKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "rows": lambda x, mask: x[mask].shape,
    "others": lambda x, mask: x[~mask].shape,
    "numbers": lambda x, mask: x[mask.unsqueeze(-1).expand_as(x)].shape,
    "of three": lambda x, mask: x.expand(3, *x.shape)[mask.expand(3, *mask.shape)].shape,
    "any": lambda x, mask: bool(mask.any()),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("token", [7, 8])
def test_tokens_that_are_counted_are_found_so_often(look: str, token: int) -> None:
    """Token 7 is there three times, 8 is not."""
    ids = torch.zeros(2, 9, dtype=torch.long)
    ids[0, 2] = ids[1, 0] = ids[1, 5] = 7
    real = LOOKS[look](torch.ones(2, 9, 5), ids == token)
    with fake_tensors():
        fake = torch.empty(2, 9, dtype=torch.long)
        count_tokens(fake, ((7, 3), (8, 0)))
        assert LOOKS[look](torch.empty(2, 9, 5), fake == token) == real


def test_tokens_that_are_not_counted_are_not_known() -> None:
    mode: FakeMode
    with fake_tensors() as mode:
        fake = torch.empty(2, 9, dtype=torch.long)
        count_tokens(fake, ((7, 3),))
        assert mode.facts.of(fake == 9) is None
        fake[0, 0] = 1
        assert mode.facts.of(fake == 7) is None


def test_the_table_says_how_often_a_token_stands_beside_a_picture() -> None:
    config = small_config("ovis2")
    begins, grid, column, row, ends = config.visual_indicator_token_ids
    counts = dict(special_tokens(config, "", {"b": 5, "pictures": 2}))
    assert counts == {begins: 10, grid: 10, column: 0, row: 0, ends: 10}
    assert special_tokens(small_config("llama"), "", {"b": 5, "pictures": 2}) == ()


def test_only_pytorchs_own_files_are_no_program() -> None:
    """Another package's folder may begin with the same letters, as torchvision's does."""
    assert not of_program(torch.nn.__file__)
    assert of_program(torchgen.__file__)
