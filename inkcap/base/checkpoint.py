"""Finds a checkpoint's directory and reads its small JSON files. No torch: the server needs these too."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub  # imports its parts when they are used: a fifth of a second that directories do without

from inkcap.base.config import hub_cache
from inkcap.base.errors import CheckpointUnreadable, ConfigInvalid, ModelNotFound
from inkcap.base.fields import Fields

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILES = ["*.json", "*.safetensors", "*.jinja", "tiktoken/*", "LICENSE*", "README.md"]  # all a published repository has
JSON_BYTES = 256 << 20  # the index of the largest published checkpoint is below one


def find_checkpoint(
    model: str, *, revision: str | None = None, download: bool = False, cache: Path | None = None
) -> Path:
    """The directory of `model`: a directory's path, or a hub id looked up in the hub cache of this machine.

    Nothing is asked over the network unless `download`. `cache` replaces the hub cache of the environment.
    Raises ModelNotFound, listing every place searched, and ConfigInvalid for a revision of a directory.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise ConfigInvalid(f"revision {revision!r} was given, but {model} is a directory; leave the revision out")
        if not (directory / "config.json").is_file():
            raise ModelNotFound(
                f"{directory} has no config.json, so it is no checkpoint; it holds {_listing(directory)}"
            )
        return directory
    cache = hub_cache() if cache is None else cache
    searched = [f"directory {directory.absolute()}: there is none"]
    if not HUB_ID.fullmatch(model) or ".." in model:
        raise _not_found(model, [*searched, "hub cache: not looked up, since this is no hub id (OWNER/NAME)"])
    try:
        found = Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, cache_dir=cache, local_files_only=not download, allow_patterns=FILES
            )
        )
    except (OSError, ValueError) as error:  # all errors of the hub are one of them
        searched.append(f"hub cache {cache}: {_cached(cache, model, revision)}")
        if download:
            searched.append(f"hub: {_first_line(error)}")
            raise _not_found(model, searched) from error
        raise _not_found(model, [*searched, "hub: not asked; --download fetches it"]) from error
    if not (found / "config.json").is_file():
        raise ModelNotFound(f"{model} in the hub cache has no config.json: {found} holds {_listing(found)}")
    return found


def without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of these pairs, for `json.loads`: a name that appears twice is a ValueError, not a silent choice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name!r} appears twice in one object")
            seen.add(name)
    return value


def read_json(file: Path) -> dict[str, object]:
    """A JSON object from a file. Raises CheckpointUnreadable."""
    try:
        if file.stat().st_size > JSON_BYTES:
            raise CheckpointUnreadable(f"{file} has {file.stat().st_size} bytes; at most {JSON_BYTES} are read")
        value = json.loads(file.read_bytes(), object_pairs_hook=without_repetition)
    except FileNotFoundError:
        raise CheckpointUnreadable(f"{file} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointUnreadable(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointUnreadable(f"{file} holds no JSON object but a {type(value).__name__}")
    return value


def read_config(directory: Path) -> dict[str, object]:
    """The parsed config.json of a checkpoint. Raises CheckpointUnreadable."""
    return read_json(directory / "config.json")


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What generation_config.json says; None where it says nothing. Names are those of SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def stated(self) -> dict[str, float | int]:
        """The parameters that have a value."""
        return {name: value for name, value in vars(self).items() if value is not None}


OVERRIDABLE = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "do_sample"))


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Default sampling parameters of a checkpoint; all None when it has no generation_config.json.

    Raises CheckpointUnreadable, and CheckpointMismatch for values that are no numbers.
    """
    file = directory / "generation_config.json"
    if not file.exists():
        return GenerationDefaults()
    return parse_generation_defaults(Fields(read_json(file), "generation_config.json"))


def parse_generation_defaults(fields: Fields) -> GenerationDefaults:
    """Default sampling parameters out of a JSON object. Raises CheckpointMismatch for values that are no numbers."""

    def number(name: str) -> float | None:
        return None if fields.null(name) else fields.number(name, above=-1.0)

    def integer(name: str) -> int | None:
        return None if fields.null(name) else fields.integer(name, least=0)

    greedy = fields.values.get("do_sample") is False
    return GenerationDefaults(
        temperature=0.0 if greedy else number("temperature"),
        top_p=number("top_p"),
        top_k=integer("top_k"),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
        max_tokens=integer("max_new_tokens"),
    )


def choose_generation_defaults(directory: Path, source: str = "auto", override: str = "") -> dict[str, float | int]:
    """Sampling parameters for requests that give none, by their names.

    `source`: auto (of the checkpoint in `directory`), vllm (none), or another folder. `override`: a JSON object whose
    values count more. Raises ConfigInvalid, CheckpointUnreadable and CheckpointMismatch.
    """
    found: dict[str, float | int] = {}
    if source != "vllm":
        folder = directory if source == "auto" else Path(source)
        if source != "auto" and not (folder / "generation_config.json").exists():
            raise ConfigInvalid(
                f"server.generation_config is {source!r}, which has no generation_config.json; "
                "use auto, vllm or a folder"
            )
        found = read_generation_defaults(folder).stated()
    if override:
        try:
            values = json.loads(override)
        except ValueError as error:
            raise ConfigInvalid(f"server.generation_override {override!r:.80} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigInvalid(f"server.generation_override {override!r:.80} is not a JSON object")
        if unknown := sorted(set(values) - OVERRIDABLE):
            raise ConfigInvalid(
                f"server.generation_override has {unknown[0]!r:.80}; it may have {', '.join(sorted(OVERRIDABLE))}"
            )
        found |= parse_generation_defaults(Fields(values, "server.generation_override")).stated()
    return found


def read_eos_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end a sequence, as generation_config.json or else config.json states them; () when neither does.

    The pair bos 1, eos 2 counts as unstated: transformers writes it for every model that never set them, and id 2 is
    ordinary text here. Raises CheckpointUnreadable and CheckpointMismatch.
    """
    sources = []
    if (directory / "generation_config.json").exists():
        sources.append(Fields(read_json(directory / "generation_config.json"), "generation_config.json"))
    whole = Fields(read_config(directory), "config.json")
    sources.append(whole)
    if whole.has("text_config"):
        sources.append(whole.block("text_config"))
    for fields in sources:
        value = fields.values.get("eos_token_id")
        if value is None or (value == 2 and fields.values.get("bos_token_id") == 1):
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(item) is int and item >= 0 for item in ids):
            raise fields.wrong("eos_token_id", "a token id or a list of them")
        return tuple(ids)
    return ()


def _cached(cache: Path, model: str, revision: str | None) -> str:
    """What the hub cache has of a model that was not found."""
    folder = cache / f"models--{model.replace('/', '--')}"
    if not folder.is_dir():
        return "the model is not in it" if cache.is_dir() else "there is none"
    refs = [str(file.relative_to(folder / "refs")) for file in sorted((folder / "refs").rglob("*")) if file.is_file()]
    snapshots = [path.name for path in sorted((folder / "snapshots").glob("*"))]
    wanted = "main (no revision was given)" if revision is None else revision
    known = ", ".join([*refs, *snapshots]) or "no revision"
    return f"it has the model, but not revision {wanted}; it has {known}"


def _listing(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _not_found(model: str, searched: list[str]) -> ModelNotFound:
    return ModelNotFound(
        f"found no checkpoint for {model!r}. Searched:\n" + "\n".join(f"  - {place}" for place in searched)
    )
