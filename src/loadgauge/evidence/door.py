"""The door of this room: predictions beside published runs, and article 5's cases. Each name is imported at its first use."""

from loadgauge.core.base.hooks import lazily

NAMES = {
    "published": "loadgauge.evidence.validate.runs:published",
    "summary": "loadgauge.evidence.validate.summary:summary",
    "validate": "loadgauge.evidence.validate.validate:validate",
    "CASES": "loadgauge.evidence.articles.autograd:CASES",
    "held": "loadgauge.evidence.articles.autograd:held",
}
"""Names that others may use, and where each is."""
__getattr__ = lazily(NAMES, __name__)
