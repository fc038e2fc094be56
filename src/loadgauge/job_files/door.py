"""The door of this room: what others use of job files. Each name is imported at its first use."""

from loadgauge.core.base.hooks import lazily

NAMES = {
    "FILES": "loadgauge.job_files.dialects:FILES",
    "OF_TEXT": "loadgauge.job_files.dialects:OF_TEXT",
    "dialect": "loadgauge.job_files.dialects:dialect",
    "from_job_file": "loadgauge.job_files.job_file:from_job_file",
    "gpus_asked": "loadgauge.job_files.job_file:gpus_asked",
    "is_job_file": "loadgauge.job_files.job_file:is_job_file",
    "served": "loadgauge.job_files.commands.served:served",
    "update_alone": "loadgauge.job_files.job_file:update_alone",
    "export_plan": "loadgauge.job_files.commands.export_text:export_plan",
    "JobFile": "loadgauge.job_files.exchange:JobFile",
    "combine": "loadgauge.job_files.exchange:combine",
    "largest": "loadgauge.job_files.reading.documents:largest",
    "named_documents": "loadgauge.job_files.exchange:named_documents",
    "read": "loadgauge.job_files.exchange:read",
    "FIELDS": "loadgauge.job_files.ideas.facts:FIELDS",
    "CONFIG_KEYS": "loadgauge.job_files.job_file:CONFIG_KEYS",
    "WITH_GPU": "loadgauge.job_files.job_file:WITH_GPU",
    "fill_in": "loadgauge.job_files.job_file:fill_in",
    "find_alike": "loadgauge.job_files.job_file:find_alike",
    "flags_given": "loadgauge.job_files.job_file:flags_given",
    "usual": "loadgauge.job_files.job_file:usual",
    "note": "loadgauge.job_files.job_file:note",
    "FLAGS": "loadgauge.job_files.export:FLAGS",
    "words": "loadgauge.job_files.export:words",
    "words_of_task": "loadgauge.job_files.convert:words_of_task",
    "heard": "loadgauge.job_files.export:heard",
    "together": "loadgauge.job_files.export:together",
    "export": "loadgauge.job_files.export:export",
}
"""Names that others may use, and where each is."""
__getattr__ = lazily(NAMES, __name__)
