"""The fields of `Job` about pictures and videos, which a tower beside a language model sees."""

from typing import Annotated

from loadgauge.core.definitions.job.job_field import about
from loadgauge.core.definitions.job.posttrain_fields import OfTask


class OfPictures(OfTask, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a job about pictures. None: not given"""

    # fmt: off
    encoders: Annotated[str | None, about(
        "choice", "method", "Encoders of a diffusion model that stay on the card (cached: none, as their results are on disk).",
        choices=("cached", "vae", "texts", "all"))] = None
    pictures: Annotated[str | None, about(
        "text", "batch", "Pictures of each sequence, how many of which width and height; their tokens are among --seq-len.",
        metavar="2x1024x768", values=("1x448x448", "2x1024x768"))] = None
    video: Annotated[str | None, about(
        "text", "batch", "Frames of a video in each sequence, as of --pictures.", metavar="32x448x448")] = None
    max_pixels: Annotated[int | None, about(
        "whole", "batch", "Pixels to which pictures are made smaller before a model sees them.", low=1, high=10**9)] = None
    tower: Annotated[str | None, about(
        "choice", "method", "What of the tower of pictures is trained (beside adapters: frozen, else: trained).",
        choices=("frozen", "projector", "adapters", "trained"))] = None
