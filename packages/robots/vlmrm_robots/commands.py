"""`vlmrm frames VERB`: success rewards from frames. Heavy imports stay inside the verbs, so that help is instant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, validators
from pydantic import BaseModel, Field, create_model

from vlmrm.commands import epilogue, give_examples
from vlmrm.errors import BelowThreshold, ConfigError
from vlmrm.libraries import needs
from vlmrm.logs import say, start_log
from vlmrm_robots import FRAMES
from vlmrm_robots.frames.settings import CollectSettings, DataCollectionSettings, Limits, Size, TrainSettings

if TYPE_CHECKING:
    from vlmrm_robots.trajectories.trajectory import TrajectoryFile

SIMULATORS = ("gymnasium", "pygame")

FOLDERS = "--positive-dir data/positive --negative-dir data/negative"
EXAMPLES = (
    f"frames collect --env Acrobot-v1 --episodes 100 {FOLDERS}",
    f"frames collect --env Acrobot-v1 --episodes 25 --policy random --seed 1 {FOLDERS}",
    f"frames import --lerobot lerobot/pusht --environment PushT {FOLDERS}",
    "frames export data/positive data/negative --to rlinf --output rlinf_data",
    "frames show data/positive data/negative --output sheet.png",
    'frames pairs data/positive data/negative --output pairs.jsonl --task "Swing the tip above the line."',
    'frames values data/positive data/negative --output values.jsonl --task "Swing the tip above the line."',
    'frames progress data/positive --model outputs/best --task "Swing the tip above the line." --output done.jsonl',
    f"frames label episodes --model judge.yaml --above 0.5 {FOLDERS}",
    f"frames train {FOLDERS} --output-checkpoint reward_model.pt",
    "frames qualify reward_model.pt new_data/positive new_data/negative --worst worst.png",
    'frames qualify judge.yaml new_data/positive new_data/negative --task "Swing the tip above the line."',
    "frames demo",
)

# Options of several verbs.
Folders = Annotated[Path, Parameter(help="Folders of trajectories.")]
Model = Annotated[
    str,
    Parameter(help="A trained reward model, the address of a service, or a YAML file of one reward."),
]
Task = Annotated[str | None, Parameter(help="The instruction of trajectories that do not say theirs.")]
ImageKey = Annotated[str | None, Parameter(help="The camera. Default: the first.")]
PositiveDir = Annotated[Path, Parameter(help="Folder for the episodes with a success.")]
NegativeDir = Annotated[Path, Parameter(help="Folder for the others.")]

app = App(
    name="frames",
    help_epilogue=epilogue(EXAMPLES[:1]),
    help="Rewards from frames: collect labelled ones, train a classifier of success, measure it.",
    default_parameter=Parameter(negative_iterable=()),
)


def _optional(settings: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of settings as options, of which None is the file's value, or the default that help names."""
    options = {}
    for name, field in settings.model_fields.items():
        if field.description:
            default = "" if field.is_required() or field.default is None else f" Default: {field.default}."
            options[name] = (field.annotation | None, Field(None, description=f"{field.description}{default}"))  # ty: ignore
    return options


OF_DATA = _optional(DataCollectionSettings)
IMAGES = {"image_size": (Size | None, Field(None, description="C H W of the frames. Default: 3 64 64."))}
# The blocks of the YAML file that hold some of the options.
BLOCKS = {**dict.fromkeys(OF_DATA, ("reward", "data_collection")), "image_size": ("reward", "reward_model")}
CollectOptions: Any = create_model("CollectOptions", **_optional(CollectSettings), **OF_DATA, **IMAGES)


@app.command
@needs(FRAMES, "a simulator", *SIMULATORS)
def collect(
    config: Path | None = None,
    /,
    *,
    options: Annotated[CollectOptions | None, Parameter(name="*", consume_multiple=True)] = None,
) -> None:
    """Play an environment with a policy, and store each frame with its true success.

    An interrupted collection resumes. Options override the file.

    Args:
        config: YAML with the options below and a `reward:` block.
    """
    from vlmrm.settings import load_file, validate
    from vlmrm_robots.frames.collecting import collect, summarise

    content = {} if config is None else load_file(config)
    for name, value in options.model_dump(exclude_none=True).items() if options else ():
        block = content
        for key in BLOCKS.get(name, ()):
            block[key] = block.get(key) or {}  # a block without keys is None in YAML
            if not isinstance(block[key], dict):
                raise ConfigError(f"{key} is {block[key]!r}: it is a block of keys.")
            block = block[key]
        block[name] = value
    if "env" not in content:
        raise ConfigError("there is no simulator to collect from: give --env, such as Acrobot-v1, or a file with env.")
    source = "the command line" if config is None else str(config)
    say(summarise(collect(validate(CollectSettings, content, source))))


def _opened(folders: Sequence[Path], purpose: str) -> list[TrajectoryFile]:
    from vlmrm_robots.trajectories.trajectory import open_folder

    if not folders:
        raise ConfigError(f"there is nothing to {purpose}: name folders of trajectories.")
    return [file for folder in folders for file in open_folder(folder)]


@app.command(name="import")
@needs(FRAMES, "importing frames")
def import_(
    *,
    positive: Path | None = None,
    negative: Path | None = None,
    episodes: Path | None = None,
    lerobot: str | None = None,
    label: str | None = None,
    last_frame: bool = False,
    positive_dir: PositiveDir,
    negative_dir: NegativeDir,
    environment: str,
) -> None:
    """Convert others' episodes to trajectory files; nothing in pickles is run.

    Args:
        positive: Folder of positive .npy files of RLinf's document.
        negative: Folder of negative .npy files.
        episodes: File or folder of RLinf's .pkl and .pt, or of robomimic's and LIBERO's .hdf5.
        lerobot: LeRobotDataset: a folder, or a repository of the hub.
        label: Its column that says which frames succeed. Default: next.success, or a next.reward of 0 and 1.
        last_frame: That column says how an episode ends, such as is_success: of a successful one the last frame
            alone is a success.
        environment: Name of the environment that they show.
    """
    from vlmrm_robots.trajectories.importing import episodes_in, import_episodes, summarise

    found = [] if lerobot and positive is negative is episodes is None else episodes_in(positive, negative, episodes)
    if lerobot:
        from vlmrm_robots.trajectories.lerobot import episodes_of

        found += episodes_of(lerobot, label, last_frame)
    say(summarise(import_episodes(found, positive_dir, negative_dir, environment)))


@app.command
@needs(FRAMES, "exporting frames")
def export(
    *sources: Path,
    to: Literal["rlinf", "lerobot"],
    output: Path,
    image_key: str | None = None,
    fps: int | None = None,
    task: str | None = None,
    progress: Path | None = None,
) -> None:
    """Write a classifier or trajectories as others read them.

    Args:
        sources: A checkpoint, or folders of trajectories.
        to: Whose format.
        output: A folder; for RLinf's classifiers, and the frames that its main branch trains on, a .pt.
        image_key: The camera of a .pt. Default: the first.
        fps: Frames a second that a LeRobotDataset says it has. Default: those of the set it was imported from, or 10.
        task: Its task. Default: the trajectory's, or the name of its environment.
        progress: A file of `vlmrm frames progress`: what a model says of these trajectories, for LeRobot's RA-BC.
    """
    if not sources:
        raise ConfigError("there is nothing to export: name a checkpoint, or folders of trajectories.")
    trajectories = sources[0].is_dir() and not (sources[0] / "config.json").exists()
    if progress and not (trajectories and to == "lerobot"):
        raise ConfigError("progress is a column of a LeRobotDataset: leave it out, or export trajectories to lerobot.")
    if trajectories:
        from vlmrm_robots.trajectories.lerobot import write_dataset
        from vlmrm_robots.trajectories.rlinf import write_document_files, write_payload

        files = _opened(sources, "export")
        if to == "lerobot":
            say(f"{write_dataset(files, output, fps, task, progress)} frames of {len(files)} episodes are in {output}")
        elif output.suffix == ".pt":
            say(f"{write_payload(files, output, image_key)} frames are in {output}")
        else:
            say(f"{len(write_document_files(files, output))} trajectories are in {output}")
    elif len(sources) > 1:
        raise ConfigError("a single checkpoint is exported at once: name one.")
    else:
        from vlmrm_robots.frames.checkpoint import load_classifier
        from vlmrm_robots.frames.foreign_classifiers import export_classifier, write_lerobot

        write = write_lerobot if to == "lerobot" else export_classifier
        say(write(load_classifier(sources[0], device="cpu").model, sources[0], output))


@app.command
@needs(FRAMES, "showing frames")
def show(
    *folders: Folders,
    output: Path = Path("frames.png"),
    image_key: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    columns: int = 12,
    rows: int = 12,
    frames: Path | None = None,
    visualize_positive: Annotated[bool, Parameter(negative="")] = False,
    vis_output_dir: Path = Path("positive_samples_vis"),
) -> None:
    """Draw trajectories as a sheet of frames, successes in green; optionally each frame as a picture.

    Args:
        output: The sheet, a PNG.
        image_key: A camera, or several. Default: all of the first trajectory.
        columns: Frames of a trajectory, from its first to its last.
        rows: Trajectories of each folder, evenly spread.
        frames: A folder for every frame as a PNG.
        visualize_positive: Write every success as a PNG named FOLDER_TRAJECTORY_frameNNN.png.
        vis_output_dir: Folder of these successes.
    """
    from vlmrm_robots.trajectories.pictures import contact_sheet, write_frames

    trajectories = _opened(folders, "show")
    files = [_opened([folder], "show") for folder in folders]
    keys = image_key or trajectories[0].keys
    say(f"the sheet is {contact_sheet(files, output, keys, columns=columns, rows=rows)}")
    if frames is not None:
        say(f"{len(write_frames(trajectories, keys, frames))} frames are in {frames}")
    if visualize_positive:
        successes = write_frames(trajectories, keys, vis_output_dir, successes_only=True)
        say(f"{len(successes)} successes are in {vis_output_dir}")


@app.command
@needs("train", "writing preferences")
def pairs(
    *folders: Folders,
    output: Path,
    task: Task = None,
    kinds: Annotated[
        list[Literal["outcome", "truncation", "rewind", "instruction"]] | None, Parameter(consume_multiple=True)
    ] = None,
    frames: int = 8,
    image_key: ImageKey = None,
    seed: int = 0,
) -> None:
    """Write preferences between episodes, for `vlmrm train`: the task is the prompt, frames are the answers.

    Args:
        output: The new file, .jsonl; its pictures go into a folder beside it.
        kinds: What an episode up to its success is preferred to: a failure (outcome), its own beginning (truncation),
            its own frames back again (rewind), the same under another task (instruction). Default: the first three.
        frames: Frames of an answer, evenly spread; fewer in both answers of a pair where one has fewer.
        seed: Seed of what is drawn.
    """
    from vlmrm_robots.trajectories.rows import write_pairs

    options: Any = {"task": task, "frames": frames, "image_key": image_key, "seed": seed}
    counts = write_pairs(_opened(folders, "compare"), output, **options, **({} if kinds is None else {"kinds": kinds}))
    of_kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    say(f"wrote {counts.total()} pairs to {output}: {of_kinds}")


@app.command
@needs("train", "writing values of frames")
def values(
    *folders: Folders, output: Path, task: Task = None, frames: int = 8, image_key: ImageKey = None, seed: int = 0
) -> None:
    """Write what each frame shows, for `vlmrm train`: the progress towards the first success, and whether it is one.

    Args:
        output: The new file, .jsonl; its pictures go into a folder beside it.
        frames: Frames of a clip, evenly spread.
        seed: Seed of what is drawn.
    """
    from vlmrm_robots.trajectories.rows import write_values

    options: Any = {"task": task, "frames": frames, "image_key": image_key, "seed": seed}
    counts = write_values(_opened(folders, "show"), output, **options)
    say(f"wrote {counts.total()} clips to {output}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}")


@app.command
@needs("train", "scoring episodes")
def progress(
    *folders: Folders, model: str, output: Path, task: str | None = None, frames: int = 8, image_key: str | None = None
) -> None:
    """Score episodes after each of their frames: do scores rise with time (value-order correlation), and tell success?

    Each episode is scored twice more as a control: with its first frame in place of all, and with its frames shuffled.

    Args:
        output: The new .jsonl file: a line for each episode, with its steps, scores and probabilities of success.
        frames: Frames of an episode, evenly spread; of a success, up to the first one.
    """
    from vlmrm.files import require_new_file
    from vlmrm_robots.trajectories.reward_models import open_prefix_scorer, score_episodes, summarise, write_scores

    files = _opened(folders, "score")
    require_new_file(output)
    scored = score_episodes(open_prefix_scorer(model), files, task=task, frames=frames, image_key=image_key)
    write_scores(scored, output)
    say(summarise(scored))


@app.command
@needs("train", "labelling episodes")
def label(
    *folders: Folders,
    model: Model,
    above: float,
    positive_dir: PositiveDir,
    negative_dir: NegativeDir,
    task: Task = None,
    image_key: ImageKey = None,
) -> None:
    """Write episodes with the labels of a judge in place of their own; an interrupted labelling goes on.

    Args:
        above: A frame is a success where its score, of that frame alone, is higher.
    """
    from vlmrm_robots.trajectories.reward_models import label_episodes, open_prefix_scorer

    files = _opened(folders, "label")
    options = {"judge": model, "above": above, "task": task, "image_key": image_key}
    say(label_episodes(open_prefix_scorer(model), files, positive_dir, negative_dir, **options))


@app.command
@needs(FRAMES, "training on frames")
def train(*, settings: Annotated[TrainSettings, Parameter(name="*", consume_multiple=True)]) -> None:
    """Train a classifier of success on labelled frames, and keep its best epoch on held-out episodes.

    Exits with 6 if the held-out episodes do not show that it tells successes from failures; the checkpoint is kept.
    """
    from vlmrm_robots.frames.training import summarise, train_classifier

    start_log("frames_train")
    trained = train_classifier(settings)
    say(summarise(trained))
    if not trained.config.qualified:
        why = trained.config.unqualified_because
        raise BelowThreshold(
            f"{trained.path} does not qualify as a reward: {why}: train it on more episodes or longer."
        )


@app.command
@needs(FRAMES, "qualifying a scorer")
def qualify(
    scorer: str,
    /,
    *folders: Folders,
    threshold: float | None = None,
    limits: Annotated[Limits | None, Parameter(name="*")] = None,
    task: Task = None,
    image_key: ImageKey = None,
    every: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1,
    image_size: tuple[int, int, int] | None = None,
    output: Path | None = None,
    worst: Path | None = None,
    output_checkpoint: Path | None = None,
) -> None:
    """Say whether anything that scores frames or episodes is a reward, and above which threshold.

    Labelled episodes that it has not seen decide. Exits with 6 if they do not show it, and says what to collect.

    Args:
        scorer: A classifier of vlmrm, RLinf or LeRobot; a trained reward model, the address of a service, a YAML file
            of one reward, or python:module:function, (task, pictures) to a score for each.
        folders: Folders of trajectories; those of a classifier's training are left out.
        threshold: Of a success: a classifier's probability, or another's score. Default: that of a classifier that was
            measured before; else it is chosen on half of the episodes, and proved on the others.
        every: Steps from one scored frame of an episode to the next; for models that are slow.
        image_size: C H W, for RLinf's files, which do not tell it.
        output: A JSON file for the figures.
        worst: A PNG for the failures that score highest, and the successes that score lowest.
        output_checkpoint: A file for the classifier with these figures and this threshold; may be the checkpoint.
    """
    from vlmrm_robots.frames import evaluation as of
    from vlmrm_robots.frames.checkpoint import load_classifier
    from vlmrm_robots.trajectories.pictures import draw_lines

    files, asked = _opened(folders, "measure on"), limits or Limits()
    classifier = of.is_classifier(scorer)
    if (task or image_key or every > 1) if classifier else (output_checkpoint or image_size):
        names = "task, image_key and every" if classifier else "output_checkpoint and image_size"
        raise ConfigError(f"{scorer} is {'a' if classifier else 'no'} classifier of frames: leave out {names}.")
    if classifier:
        if threshold is not None and not 0 < threshold < 1:
            raise ConfigError(f"threshold is {threshold}: it is a share between 0 and 1.")
        loaded = load_classifier(scorer, image_size=image_size)
        found = of.qualify_classifier(loaded, files, asked, threshold)
        if output_checkpoint is not None:
            of.record(found, loaded, output_checkpoint)
    else:
        from vlmrm_robots.trajectories.reward_models import open_prefix_scorer

        shown: Any = {"task": task, "image_key": image_key, "every": every}
        found = of.qualify_scorer(open_prefix_scorer(scorer), scorer, files, asked, threshold, **shown)
    if output is not None:
        of.write_evaluation(found, output)
    if worst is not None:
        draw_lines(found.worst, worst, of.WORST)
    say(str(found))
    if found.reason is not None:
        raise BelowThreshold(f"{scorer} does not qualify as a reward on these episodes: {found.reason}.")


@app.command
@needs(FRAMES, "training on frames")
def demo(*, output: Path = Path("outputs/frames_demo"), seed: int = 0) -> None:
    """Collect frames of Acrobot, train a classifier on them, measure it on others, and reward a policy, in minutes.

    Args:
        output: Folder of the frames, the classifier and summary.json; an interrupted demo resumes there.
        seed: Seed of every part.
    """
    from vlmrm_robots.frames.demo import run_demo

    start_log("frames_demo")
    run_demo(output, seed)


give_examples(app, EXAMPLES, "frames ")
