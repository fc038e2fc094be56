"""`Watch` as a callback of Lightning's Trainer."""

from typing import Any

from loadgauge.pytorch.measure.watch import Watch

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # the same class under its older name
    except ImportError:
        raise ImportError("loadgauge.pytorch.measure.lightning_watch needs lightning: pip install lightning") from None

__all__ = ["PredictionCallback"]


class PredictionCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Prints prediction beside measurement in the first steps, and warns before memory runs out.

    The arguments are those of `Watch`: an `Estimate`, a `Job`, or a MODEL with the flags of the job. A step is one of the
    optimizer, with all the batches that are accumulated for it. evidence: as in `trainer_watch`
    """

    def __init__(self, predicted: Any, **arguments: Any) -> None:
        super().__init__()
        say, self.evidence = arguments.pop("say", print), arguments.pop("evidence", None)
        self._main, self._open = True, False
        self.watch = Watch(predicted, say=lambda text: say(text) if self._main else None, **arguments)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step with the first of its batches; called by Lightning."""
        if not self._open:
            self._main, self._open, self._before = trainer.is_global_zero, True, trainer.global_step
            self.watch.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step with the batch at which the optimizer stepped; called by Lightning."""
        if self._open and trainer.global_step > self._before:
            self._open = False
            self.watch.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop the instruments if the training ends within a step; called by Lightning."""
        self.watch.close(self.evidence if self._main else None)
