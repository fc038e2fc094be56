"""`Watch` as a callback of transformers' Trainer (and TRL's, which are of its kind)."""

from typing import Any

from transformers import TrainerCallback

from loadgauge.pytorch.measure.watch import Watch

__all__ = ["PredictionCallback"]


class PredictionCallback(TrainerCallback):
    """Prints prediction beside measurement in the first steps, and warns before memory runs out.

    The arguments are those of `Watch`: an `Estimate`, a `Job`, or a MODEL with the flags of the job.

    evidence: a file to write at the end, with the run as measured and as predicted (`loadgauge evidence`); sent nowhere

    `trainer.add_callback(PredictionCallback("llama-3.1-8b", gpu="h100", gpus=8, zero=3))`; afterwards `.watch` has
    `peak` [bytes], `seconds` of each step and `warnings`.
    """

    def __init__(self, predicted: Any, **arguments: Any) -> None:
        say, self.evidence = arguments.pop("say", print), arguments.pop("evidence", None)
        self._main = True
        self.watch = Watch(predicted, say=lambda text: say(text) if self._main else None, **arguments)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a step; called by transformers' Trainer."""
        self._main = state.is_world_process_zero
        self.watch.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step; called by transformers' Trainer."""
        self.watch.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the instruments if the training ends early; called by transformers' Trainer."""
        self.watch.close(self.evidence if self._main else None)
