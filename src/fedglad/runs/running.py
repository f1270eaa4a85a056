"""Running a configuration in its folder, from the start or from its last checkpoint."""

import json
import logging
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from fedglad.config.keys import flat
from fedglad.config.schema import Config, ConfigError, load
from fedglad.core import checkpoint, checksums, files, malloc
from fedglad.core.interruptible import interruptible
from fedglad.records import Round
from fedglad.runs import extending, own_code, pruning
from fedglad.runs.checkpoints import Keep, check_format, restore, save
from fedglad.runs.folder import Busy, Interrupted, Records, Run, RunError, locked, make_folder
from fedglad.runs.models import CHOSEN_BY, Best, write_models
from fedglad.runs.reader import BULK, CLIENT_SCORES, MODELS
from fedglad.runs.summary import summary_damage, write_summary
from fedglad.runs.trusted_code import remember, trusted
from fedglad.simulation.engines.base import EngineLost
from fedglad.simulation.simulation import Simulation

OnRound = Callable[[Round], str | None]
"""Called with each round, which has its `server`; a text ends the run, and is the reason for it."""


def execute(
    name: str,
    config: Config,
    *,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    accept_old: bool = False,
    keep_state: bool | None = None,
    extend: Path | None = None,
    trust_code: bool = False,
    on_round: OnRound | None = None,
    busy: Busy | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> Run:
    """Runs a configuration in its folder, from the start or from its last checkpoint.

    A finished run of the same configuration is left as it is. A folder that another process is
    writing is refused, unless `busy` waits for it. Code that a run's folder names, and `load` has
    therefore not loaded, is run only if it was trusted for this folder before: `trust_code` trusts
    it. What is damaged of an unfinished run is said to `on_lost`, and the run goes on from the last
    state that is whole. `on_round` is called with each round; if it raises, what is done is saved.

    A run with other own code than today's is neither reused nor gone on with, unless `accept_old`:
    without `out` the new run is put beside it, which is said to `on_lost`, else it is refused.
    With `resume`, a run of fewer rounds is gone on with: that in `out`, that in `extend`, or one
    in runs/. When it is finished, a run keeps what it takes to go on if that is small and no
    client's memory; `keep_state` says otherwise.

    >>> import pathlib, tempfile
    >>> from fedglad.config import load
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> run = execute(*load("digits", {"rounds": 2, "client.epochs": 1}), out=folder)
    >>> [line["status"] for line in run.rounds()]
    ['stepped', 'stepped']
    >>> run = execute(*load("digits", {"rounds": 3, "client.epochs": 1}), out=folder, resume=True)
    >>> len(run.rounds())  # of which two were done
    3
    """
    say = on_lost or _say_nothing
    default = Path("runs") / f"{name}-{config.hash()}"
    config = trusted(config, out or default, trust_code=trust_code)
    if out is None:
        out, found = extending.place_among(
            name, config, resume=resume and extend is None, force=force, accept_old=accept_old
        )
        extend = extend or found
        if beside := own_code.said_of(out, config):
            say(beside)
    run, extend = Run(out), None if force else extend
    path = run.folder / "config.toml"
    if not force and path.is_file():
        config = config.as_begun(path.read_text("utf-8", errors="replace"))
    longer = resume and not force and _is_longer(run, config)
    if not force:
        _require_same_code(run, config, say, accept_old=accept_old)
        if not longer and _finished(run, config):
            pruning.tidy(run, busy)
            return run
    if path.is_file() and not (resume or force):
        with locked(run.folder, busy):
            raise RunError(
                f"{run.folder} holds an unfinished run: go on with --resume, or replace it with "
                "--force"
            )
    if extend and not extending.is_stateful(run.folder):
        extending.require_state(extend, config)
    if not path.is_file() and (inside := next(run.folder.glob("*/config.toml"), None)):
        raise RunError(
            f"{run.folder} is a folder of runs, {inside.parent.name} for one, which nobody would "
            "see any more beside a run's own files: choose another --out, one within it for example"
        )
    malloc.keep()
    plan, text = config.plan(), config.to_toml()
    # If it cannot start, nothing is touched.
    with (
        interruptible() as asked_to_stop,
        closing(Simulation(plan, run.folder / "memories")) as simulation,
    ):
        make_folder(run.folder)
        with locked(run.folder, busy):
            if not force and not longer and _finished(run, config):  # by another process, meanwhile
                return run
            try:
                code = own_code.code_of(config)
                if force:
                    run.clear()
                elif path.is_file() and run.count():
                    code = own_code.continued(own_code.recorded_code(run.folder), code)
                elif extend:
                    code = own_code.continued(own_code.recorded_code(extend), code)
                if longer and run.summary is not None:
                    say(extending.reopen(run, config))
                # A file that is the same already stays: its time is that of the run's start.
                text = own_code.with_code(text, code)
                there = path.read_text("utf-8", errors="replace") if path.is_file() else None
                if there not in (text, checked := checksums.toml_with_crc(text)):
                    files.write_text(path, checked)
                if simulation.counts is not None:
                    counts = simulation.counts.astype(int).tolist()  # (client, class), for reports
                    labels = checksums.json_with_crc(json.dumps({"counts": counts}))
                    files.write_text(run.folder / "labels.json", labels)
                remember(config, run.folder)
                best = Best(run.folder, config.hash()) if simulation.validates else None
                if (stateful := extending.is_stateful(run.folder)) or not _summarise(
                    run, config, simulation
                ):
                    if extend and not stateful:
                        say(extending.begin_from(extend, run.folder, config))
                    restore(run, simulation, on_lost=on_lost, best=best)
                    _play(
                        run,
                        config,
                        simulation,
                        on_round or (lambda _: None),
                        asked_to_stop,
                        best,
                        keep_state,
                    )
            except OSError as error:
                raise RunError(
                    f"{run.folder} could not be written: {error}. What was saved is intact: "
                    "make room and go on with --resume"
                ) from error
    return run


def _say_nothing(text: str) -> None:
    pass


def _require_same_code(
    run: Run, config: Config, say: Callable[[str], None], *, accept_old: bool
) -> None:
    """RunError if the folder's run has other own code, unless that is accepted."""
    if (names := own_code.other_code(run.folder, config)) and not accept_old:
        finished = (run.folder / "summary.json").is_file()
        raise RunError(own_code.refusal(run.folder, names, finished=finished))
    if unnoted := own_code.unnoted_code(run.folder, config):
        say(
            f"{run.folder} is of a version of fedglad that did not note what own code was: whether "
            f"{unnoted} has been changed since is not known"
        )


def _is_longer(run: Run, config: Config) -> bool:
    begun = extending.begun_as(run.folder, config)
    return begun is not None and extending.is_longer(begun, config)


def _finished(run: Run, config: Config) -> bool:
    """Whether there is nothing to do; what else is in the folder must be the same run."""
    path = run.folder / "config.toml"
    if not path.is_file():
        return False
    try:
        there = load(path, trust_code=config.own_names().values())[1]
    except ConfigError as error:
        raise RunError(
            f"{path} is damaged, so it is not known which run this is: {error}. Choose another "
            "--out, or replace the run with --force"
        ) from None
    if there.hash() != config.hash():
        if extending.is_longer(there, config):
            raise RunError(
                f"{run.folder} holds this run with rounds = {there.rounds}: go on with it by "
                "--resume, choose another --out, or replace it with --force"
            )
        raise RunError(
            f"{run.folder} holds a run with another configuration{_difference(there, config)}: "
            "choose another --out, or replace it with --force"
        )
    summary = run.summary
    if summary is None:
        return False
    versions = summary.get("versions")
    check_format(run, versions if isinstance(versions, dict) else {})
    if damage := summary_damage(summary):
        raise RunError(
            f"{run.folder}/summary.json is damaged: {damage}. Remove that file and go on with "
            "--resume, which writes it anew"
        )
    return True


def _difference(there: Config, wanted: Config) -> str:
    """The first keys in which two configurations differ, with both values."""
    old, new = flat(there.to_dict()), flat(wanted.to_dict())
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    names = [key for key in keys if key.endswith(".name")]
    few = [f"{key} = {old.get(key)!r}, not {new.get(key)!r}" for key in (names or keys)[:3]]
    return f" ({'; '.join(few)}{'; …' if len(names or keys) > 3 else ''})" if few else ""


def _play(
    run: Run,
    config: Config,
    simulation: Simulation,
    on_round: OnRound,
    asked_to_stop: Callable[[], bool],
    best: Best | None,
    keep_state: bool | None,
) -> None:
    folder = run.folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    if asked_to_stop():
        raise Interrupted(f"stopped before a round began: go on with --resume (in {run.folder})")
    keep = Keep(last=config.keep_checkpoints, every=config.keep_every, best=config.keep_best)
    score: float | None = None
    simulation.recall(run.iter_rounds(without=BULK))
    tables = Records(run.folder / CLIENT_SCORES) if simulation.tested_clients else None
    with Records(run.folder / "rounds.jsonl") as records, tables or nullcontext():
        rounds = simulation.rounds()
        while True:
            try:
                if (played := next(rounds, None)) is None:
                    break
            except EngineLost as error:
                save(folder, simulation, records, best, tables, keep=keep, score=score)
                raise Interrupted(
                    f"{error}. {simulation.t} of {config.rounds} rounds are saved: go on with "
                    f"--resume (in {run.folder})"
                ) from error
            records.write(played.to_dict())
            score = signed_score(played)
            if tables and (table := played.client_line()):
                tables.write(table)
            if best:
                best.look(played, simulation.server)
            for client, reason in played.record.rejected.items():
                log = logging.getLogger("fedglad")
                log.warning("round %d: client %s left out: %s", played.t, client, reason)
            try:
                simulation.stopping.asked = on_round(played) or ""
            except Exception:
                save(folder, simulation, records, best, tables, keep=keep, score=score)
                raise
            stop = asked_to_stop()
            done = simulation.t == config.rounds or bool(simulation.stopping.reason)
            due = simulation.t % config.checkpoint_every == 0 or keep.due(simulation.t)
            if stop or done or due:
                save(folder, simulation, records, best, tables, keep=keep, score=score)
            if stop and not done:
                raise Interrupted(
                    f"stopped after {simulation.t} of {config.rounds} rounds, all saved: go on "
                    f"with --resume (in {run.folder})"
                )
    models = write_models(run.folder, simulation.server, simulation.t, config.hash())
    models |= best.write() if best else {}
    if keep_state is None and (simulation.stopping.asked or keep.lasting):
        keep_state = True  # whoever asked for the end, or for checkpoints, may want to go on
    kept = pruning.keeps(run.folder, config.sections["client"], keep_state)
    write_summary(run, models, _more(run, config, simulation, kept))
    if not kept:
        pruning.remove_state(run.folder)


def signed_score(played: Round) -> float | None:
    """The score of a round, of which more is better: on the validation set, if there is one."""
    scores = (played.scored(which) for which in ("validation", "test"))
    known = next((one for one in scores if one is not None), None)
    return None if known is None else played.score.sign * known


def _more(run: Run, config: Config, simulation: Simulation, kept: bool | str) -> dict[str, Any]:
    """What the summary says beside what the records say."""
    more: dict[str, Any] = {"update_bytes": simulation.update_bytes, pruning.KEPT_KEY: kept}
    if code := own_code.recorded_code(run.folder):
        more["code"] = code
    if not kept:  # checkpoints say it else
        layout = simulation.server.layout
        more["sizes"] = dict(zip(layout.names, layout.numels, strict=True))
    if simulation.stopping.reason and run.count() < config.rounds:
        more["stopped"] = simulation.stopping.reason
    return more


def _summarise(run: Run, config: Config, simulation: Simulation) -> bool:
    """Writes the summary of a run that kept no state, if all else of it is there.

    So a summary that was damaged, and removed, costs no round again.
    """
    records, models = run.rounds(without=BULK), dict[str, str]()
    simulation.recall(records)
    needed = {"model", *(["averaged"] if simulation.server.has_average else [])}
    try:
        for path in (path for name in MODELS if (path := run.folder / name).is_file()):
            meta = checksums.verify_tensors(path)[0]
            whole = path.stem in CHOSEN_BY or meta.get("round") == len(records)
            if whole and meta.get("run") == config.hash():
                models[path.name] = checkpoint.checksum(path)
    except (ValueError, OSError):
        return False
    if simulation.validates:
        needed |= {
            which
            for which, readout in CHOSEN_BY.items()
            if any(
                record.get(f"{readout}_{simulation.score.name}") is not None for record in records
            )
        }
    done = len(records) == config.rounds or bool(simulation.stopping.reason)
    if not records or not done or not needed <= {Path(name).stem for name in models}:
        return False
    write_summary(run, models, _more(run, config, simulation, False))
    return True
