"""Uploads: configs of models, kept in memory by the digest of their text, and files of lengths, kept on disk."""

import hashlib
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from loadgauge.core.base.errors import NotModelled, refuse
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.families.hf import decode, from_dict

PREFIX = "upload:"
MOST = 64
"""Uploads of each kind that are kept; the oldest is dropped first."""
DIGITS = 16
"""Hexadecimal digits of the digest in an id."""


class Uploads:
    """Uploaded texts by id. A text always has the same id, so that a page can upload it again after a restart."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="loadgauge-")
        self.models: OrderedDict[str, tuple[ModelSpec | NotModelled, str, str]] = OrderedDict()
        self.files: OrderedDict[str, tuple[str, Path]] = OrderedDict()

    def close(self) -> None:
        """Delete the files on disk."""
        self.folder.cleanup()

    @staticmethod
    def key(text: str) -> str:
        """Return the id of a text: a prefix and digits of its SHA-256 digest."""
        return PREFIX + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]

    def add_model(self, text: str, name: str) -> str:
        """Keep a Hugging Face config, whether a family reads it or not, and return its id. Raises `ConfigError` for other texts."""
        spec: ModelSpec | NotModelled
        try:
            spec = from_dict(_config(text, name), name, own_name(name))
        except NotModelled as error:
            spec = error
        key = self.key(text)
        self.models[key] = spec, name, text
        self.models.move_to_end(key)
        while len(self.models) > MOST:
            self.models.popitem(last=False)
        return key

    def add_file(self, text: str, name: str, original: str) -> str:
        """Keep a text as a file and return its id. original: the text from which the id is made."""
        self.put_file(key := self.key(original), text, name)
        return key

    def put_file(self, key: str, text: str, name: str) -> None:
        """Keep a text as a file under a given id; the oldest file is deleted where there are more than `MOST`."""
        path = Path(self.folder.name) / key.removeprefix(PREFIX)
        path.write_text(text, encoding="utf-8")
        self.files[key] = name, path
        while len(self.files) > MOST:
            self.files.popitem(last=False)[1][1].unlink(missing_ok=True)

    def model(self, key: str) -> ModelSpec:
        """Return the uploaded model of an id, as a family reads it.

        Raises `ConfigError` if it is no longer kept, `NotModelled` where no family reads it.
        """
        spec = self._kept(key)[0]
        if isinstance(spec, NotModelled):
            raise spec
        return spec

    def keys(self, key: str) -> tuple[str, dict[str, Any]]:
        """Return the name of an uploaded config, by its id, and its keys. Raises `ConfigError` if it is no longer kept."""
        _, name, text = self._kept(key)
        return name, _config(text, name)

    def _kept(self, key: str) -> tuple[ModelSpec | NotModelled, str, str]:
        refuse(key not in self.models, "this file is not here any more: hand it in again", key="model")
        return self.models[key]

    def path(self, key: str, flag: str) -> str:
        """Return the path of an uploaded file. Raises `ConfigError` for anything but an id, such as a path of the user's."""
        refuse(key not in self.files, "only a file that was handed in can be read: drop it on the page", key=flag)
        return str(self.files[key][1])

    def config(self, key: str) -> Path:
        """Write the config of an uploaded model, by its id, to disk and return its path. Raises as `model`."""
        self._kept(key)
        folder = Path(self.folder.name) / "models" / key.removeprefix(PREFIX)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "config.json"
        file.write_text(self.models[key][2], encoding="utf-8")
        return file

    def of(self, flags: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
        """Return the uploads that the flags refer to, for another process: text, name and kind (model or file) by id."""
        texts = {}
        for key in map(str, flags.values()):
            if key in self.models:
                texts[key] = self.models[key][2], self.models[key][1], "model"
            if key in self.files:
                texts[key] = self.files[key][1].read_text(encoding="utf-8"), self.files[key][0], "file"
        return texts

    def name(self, key: str) -> str:
        """Return the original file name of an uploaded model, or the key itself."""
        return self.models[key][1] if key in self.models else key

    def name_of_path(self, path: str) -> str:
        """Return the original name of an uploaded file, by the path where it is kept."""
        return next(
            (name for name, path_of_file in self.files.values() if str(path_of_file) == path), os.path.basename(path)
        )


def _config(text: str, name: str) -> dict[str, Any]:
    config: dict[str, Any] = decode(text.encode("utf-8", "surrogatepass"), name)
    return config


def own_name(file: str) -> str:
    """Name the model of a config file after the file; empty for `config.json`.

    >>> own_name("my-model.json"), own_name("config.json")
    ('my-model', '')
    """
    stem = Path(file).stem
    return "" if stem == "config" else stem


def plain_name(text: str) -> str:
    """Return the name of a file without folders and unprintable characters.

    >>> plain_name("../../etc/my config.json"), plain_name("")
    ('my config.json', 'file')
    """
    last = text.replace("\\", "/").rpartition("/")[2]
    shown = "".join(letter for letter in last if letter.isprintable())[:120].strip().lstrip("-")
    return shown if shown not in ("", ".", "..") else "file"


def handed_in(texts: dict[str, list[str]]) -> Uploads:
    """Rebuild `Uploads` in another process from what `Uploads.of` returned."""
    uploads = Uploads()
    for key, (text, name, kind) in texts.items():
        if kind == "model":
            uploads.add_model(text, name)
        else:
            uploads.put_file(key, text, name)
    return uploads
