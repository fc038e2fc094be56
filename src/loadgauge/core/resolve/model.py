"""The model of a job: by its family, or by another road where no family reads it."""

from __future__ import annotations

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.base.files import is_script
from loadgauge.core.base.model_sources import ROADS
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.families.catalogue import Found, find
from loadgauge.core.families.hub import allowed


def found_model(job: Job) -> Found:
    """The model of a job: of its family, or by one of `ROADS` where no family reads it, or the job asks for that road.

    Raises ConfigError or NotModelled where there is none.
    """
    script = is_script(job.model)
    if job.inputs is not None and not script:
        raise ConfigError("is for script.py:function; what a MODEL is called with is known", key="inputs")
    if script and job.road == "written":
        raise ConfigError("a module of one's own has no written family: --road captured", key="road")
    if not ROADS or not (script or job.road == "captured"):
        try:
            return find(job.model, allowed(job.hub))
        except NotModelled as error:
            if not ROADS or job.road == "written":
                raise
            unread = error
        try:
            found: Found = ROADS[0](job, "no family here reads it")
        except (NotModelled, ConfigError) as error:
            raise type(error)(f"{str(unread).split('; where ')[0]}; and captured: {error}") from None
        return found
    captured: Found = ROADS[0](job, "")
    return captured
