"""The model of a job: by its family, or recorded from its code where no family reads it."""

import msgspec

from loadgauge.core.base import ConfigError, NotModelled, is_script, need, provider, refuse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.families.catalogue import Found, find, keys
from loadgauge.core.families.encoders import pictures
from loadgauge.core.families.hub import allowed

LACKS = "pip install"
"""In an error that names what is not installed."""


def found_model(job: Job) -> Found:
    """Return the model of a job: of its family, or of another source where no family reads it, or the job asks for that.

    Raises ConfigError or NotModelled where there is none.
    """
    script = is_script(job.model)
    of_library = getattr(provider("MODEL_SOURCES"), "of_library", bool)
    for name in ("inputs", "rows"):
        refuse(
            getattr(job, name) is not None and not script and not (name == "inputs" and of_library(job.model)),
            "needs script.py:function; the inputs of a MODEL are known",
            key=name,
        )
    refuse(script and job.road == "written", "a module of one's own has no written family: --road captured", key="road")
    library = ":" in job.model and not script and of_library(job.model)
    if script or library or job.road == "captured":
        recorded: Found = need("MODEL_SOURCES").model(job, "")
        return recorded
    why, written = "no family here reads it", None
    try:
        written = find(job.model, allowed(job.hub))
        section, source = pictures.unwritten(job, written.spec), provider("MODEL_SOURCES")
        if not section or source is None or job.road == "written" or not keys(job.model, whole=True).get(section):
            return written
        why = f"the layers of its {section} are not written here"
        unread = NotModelled(f"{written.spec.name}: {why}")
    except ConfigError:
        if job.road == "written" or not of_library(job.model):
            raise
        return need("MODEL_SOURCES").model(job, "")  # type: ignore[no-any-return]
    except NotModelled as error:
        source = provider("MODEL_SOURCES")
        if source is None or job.road == "written":
            raise
        unread = error
    try:
        other: Found = source.model(job, why)
    except (NotModelled, ConfigError) as error:
        if written is not None and (isinstance(error, NotModelled) or LACKS in str(error)):
            return msgspec.structs.replace(
                written, how="; ".join(filter(None, (written.how, f"its own code: {error}")))
            )
        raise type(error)(f"{str(unread).split('; where ')[0]}; and captured: {error}") from None
    return other
