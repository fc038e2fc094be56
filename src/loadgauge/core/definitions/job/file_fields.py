"""The fields of `Job` that say which job files of other tools are read, and how."""

from typing import Annotated

from loadgauge.core.definitions.job.job_field import about
from loadgauge.core.definitions.job.picture_fields import OfPictures


class OfFiles(OfPictures, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a job about job files. None: not given"""

    beside: Annotated[
        str | None,
        about(
            "text", "file",
            "Further job files of the same run, such as accelerate's or DeepSpeed's beside the trainer's; several with commas.",
            metavar="FILE,...", aliases=("with",),
        ),
    ] = None  # fmt: skip
    dialect: Annotated[
        str | None,
        about(
            "text", "file",
            "Tool that MODEL is a job file of, where its keys do not tell; beside a model's name, in whose keys remedies are told.",
            metavar="DIALECT", aliases=("from",),
        ),
    ] = None  # fmt: skip
    base_model: Annotated[
        str | None,
        about(
            "text", "file", "The model that a job FILE trains, where it names none or another.", metavar="MODEL",
            aliases=("model",),
        ),
    ] = None  # fmt: skip
    strict: Annotated[
        bool | None,
        about("switch", "file", "No answer where a job file has a key that is not counted, or is not known and may matter."),
    ] = None  # fmt: skip
    ignore: Annotated[
        str | None,
        about("text", "file", "Keys of job files to leave out, as the file writes them; several with commas.", metavar="KEY,..."),
    ] = None  # fmt: skip
    variables: Annotated[
        str | None,
        about(
            "text", "file",
            "Values of variables that a shell script sets nowhere, before those of the environment; several with commas or flags.",
            metavar="NAME=VALUE", aliases=("set",), repeats=True,
        ),
    ] = None  # fmt: skip
