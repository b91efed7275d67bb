"""Each intervention changes one thing and nothing else, and is declared once."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.conversations import references
from vlmrm.conversation import Comparison, Image, Judgement, Message, Text, Video, VideoOptions, media_of, text_of
from vlmrm.data.media import open_image, open_video
from vlmrm.errors import ConfigError
from vlmrm.measures import changes
from vlmrm.measures.changes import AGREEMENT
from vlmrm.measures.donors import cluster_of, is_sampled
from vlmrm.measures.interventions import INTERVENTIONS, PATCHES, SCATTERED, alterations, named
from vlmrm.measures.pairs import PairArrays, ScoredComparisons, scored_frame

RNG = np.random.default_rng(0)


def picture(width=84, height=56) -> Pillow.Image:
    """A picture in which no pixel is like the next, and the mean is not grey."""
    return Pillow.fromarray(RNG.integers(0, 200, (height, width, 3), dtype=np.uint8))


def answer(*parts) -> tuple[Message, ...]:
    return (Message.of("assistant", *parts),)


def asked(number: int, question: str, *media, **more) -> Comparison:
    answers = (answer("It is **red**. It has two ears."), answer("It is blue, as far as one can see in this light."))
    prompt = (Message.of("system", "Be brief."), Message.of("user", *media, question))
    return Comparison(f"row-{number}", prompt, answers, (Judgement((0, 1), (1, 0)),), **more)


CLIP = Video(tuple(picture() for _ in range(6)), VideoOptions(sample_fps=2.0))
ROW = asked(0, "What is shown in the images?", Image(picture()), CLIP, Image(picture()))
DONORS = tuple(
    asked(i, f"How many are there, {i}?", *(Image(picture(56, 56)), Video((picture(),) * 4), Image(picture(56, 56))))
    for i in (1, 2)
)
CHANGED = {name: intervention(ROW, DONORS) for name, intervention in INTERVENTIONS.items()}


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_an_intervention_changes_its_part_alone_and_repeatably(name):
    before = pickle.dumps(ROW)
    changed, again = CHANGED[name], INTERVENTIONS[name](ROW, DONORS)
    assert pickle.dumps(ROW) == before, "the row itself is left as it is"
    assert pickle.dumps(changed) == pickle.dumps(again)
    assert changed is not None and changed != ROW
    of_answers = INTERVENTIONS[name].family in ("style", "order")
    assert (changed.prompt != ROW.prompt, changed.answers != ROW.answers) == (not of_answers, of_answers)


@pytest.mark.parametrize("family", ["image", "part", "frames"])
def test_changed_images_and_frames_keep_number_and_size(family):
    for name in named([family]):
        changed = CHANGED[name]
        assert text_of(changed.prompt) == text_of(ROW.prompt)
        before, after = media_of(ROW.prompt), media_of(changed.prompt)
        assert [medium.kind for medium in before] == [medium.kind for medium in after]
        if not name.startswith(("swapped", "other")):
            assert after[1].options == CLIP.options
            assert [open_image(frame).size for frame in after[1].reference] == [(84, 56)] * 6


def test_each_painting_keeps_its_own_of_a_picture():
    """A wide gradient of red: tiles keep the colours, grey the shapes, another file both, a blank nothing."""
    red = np.add.outer(range(96), range(192)).astype(np.uint8) // 2
    original = Pillow.fromarray(np.stack([red, red // 2, red // 3], axis=2))
    painted = {"file": changes.filed_anew, "grey": changes.colourless, "blank": changes.grey}
    painted |= {"scattered": changes.in_tiles(SCATTERED), "patches": changes.in_tiles(PATCHES)}
    found = {
        name: np.asarray(open_image(paint(original)).resize(original.size), int) for name, paint in painted.items()
    }
    alike = {name: np.corrcoef(red.ravel(), it[..., 0].ravel())[0, 1] for name, it in found.items() if name != "blank"}
    assert alike["file"] > 0.99 and alike["grey"] > 0.99 and abs(alike["scattered"]) < 0.1 and alike["patches"] < 0.6
    assert np.ptp(found["blank"]) == 0 and not (found["grey"][..., 0] - found["grey"][..., 2]).any()
    for name in ("scattered", "patches"):
        assert np.sort(found[name][..., 0], axis=None) == pytest.approx(np.sort(red, axis=None), abs=8)
        assert changes.in_tiles(48)(picture(30, 9)).size == (30, 9)


def test_all_images_but_the_first_are_exchanged():
    shown, own, others = (references(row.prompt) for row in (CHANGED["other_images"], ROW, DONORS[0]))
    assert shown == [own[0], own[1], others[0]]
    assert INTERVENTIONS["other_images"](DONORS[0], [asked(3, "Why?")]) is None
    assert INTERVENTIONS["other_images"](asked(4, "Why?", Image(picture())), DONORS) is None, "it has one"


def test_image_answers_are_painted_and_degraded_never_exchanged():
    drawn = replace(ROW, answers=(answer(Image(picture())), answer(Image(picture()))))
    for name in ("blank_image", "same_image"):
        assert INTERVENTIONS[name](drawn, DONORS).answers != drawn.answers
    for name in named(["swapped_image", "prompt", "question"]):
        assert INTERVENTIONS[name](drawn, DONORS).answers == drawn.answers
    for name in named(["style"]):
        assert INTERVENTIONS[name](drawn, DONORS) is None


def test_a_video_file_is_painted_as_scored(tmp_path):
    import av

    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 140, 112, "yuv420p"
        for number in range(24):
            pixels = np.full((112, 140, 3), 10 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    row = asked(0, "What happens?", Video(str(path)))
    expected, described = open_video(Video(str(path)), 4.0, 768)
    altered = {
        intervention.name: changed
        for intervention, changed in alterations(row, (), INTERVENTIONS.values(), frames=(4.0, 768))
    }
    for name in ("blank_image", "shuffled_frames"):
        [video] = media_of(altered[name].prompt)
        frames, metadata = open_video(video, 4.0, 768)
        assert frames.shape == expected.shape and expected.shape[0] == 12
        at, of_file = ([index / m["fps"] for index in m["frames_indices"]] for m in (metadata, described))
        assert at == pytest.approx(of_file, abs=0.1)
    means = [round(frame.float().mean().item()) for frame in frames]
    assert means != sorted(means) == [round(frame.float().mean().item()) for frame in expected]


def test_the_question_alone_is_exchanged_or_left_out():
    swapped, without = CHANGED["swapped_question"], CHANGED["no_question"]
    assert references(swapped.prompt) == references(without.prompt) == references(ROW.prompt)
    assert text_of(swapped.prompt) == "Be brief.\nHow many are there, 1?"
    assert text_of(without.prompt) == "Be brief.\n"
    same = [replace(donor, prompt=ROW.prompt) for donor in DONORS]
    assert INTERVENTIONS["swapped_question"](ROW, same) is None, "the same question is no other one"


def test_the_last_question_of_a_dialogue_is_exchanged():
    first = (Message.of("user", Image(picture()), "Hello."), Message.of("assistant", "Yes?"))
    last = Message.of("user", "See ", Image(picture()), " and say why.")
    row = replace(ROW, prompt=(*first, last))
    swapped = INTERVENTIONS["swapped_question"](row, DONORS)
    assert swapped.prompt[:2] == first
    assert [part.kind for part in swapped.prompt[2].content] == ["text", "image"]
    assert swapped.prompt[2].text == "How many are there, 1?"


def test_two_donors_give_two_swaps_of_one_kind():
    first, second = (references(CHANGED[name].prompt) for name in ("swapped_image", "swapped_image_again"))
    assert first == references(DONORS[0].prompt) and second == references(DONORS[1].prompt)
    assert INTERVENTIONS["swapped_image_again"](ROW, DONORS[:1]) is None
    assert INTERVENTIONS["swapped_image"](ROW, [asked(3, "Why?", Image(picture()))]) is None, "it has no video"


def test_only_the_longest_text_of_answers_is_rewritten():
    interleaved = answer("A. ", Image(picture()), "This is the text itself.")
    row = replace(ROW, answers=(interleaved, answer(Image(picture()))))
    changed = INTERVENTIONS["agreeing_answers"](row)
    texts = [part.text for part in changed.answers[0][0].content if isinstance(part, Text)]
    assert texts == ["A. ", f"{AGREEMENT}This is the text itself."]
    assert changed.answers[1] == row.answers[1]


def test_reversed_answers_carry_judgements_and_restore_scores():
    row = replace(ROW, answers=(*ROW.answers, answer("c")), judgements=(Judgement((0, 1, 2), (3, 2, 1)),))
    changed = INTERVENTIONS["reversed_answers"](row)
    assert changed.answers == row.answers[::-1] and changed.ratings == (1, 2, 3)
    assert INTERVENTIONS["reversed_answers"].in_branches([1, 2, 3]) == [3, 2, 1]
    assert INTERVENTIONS["padded_answers"].in_branches([1, 2, 3]) == [1, 2, 3]


def test_attack_margins_compare_against_the_decorated_rejected_answer():
    result = ScoredComparisons([ROW], [[2.0, 1.0]], [{"padded_answers": [9.0, 5.0], "same_image": [9.0, 5.0]}])
    pairs = PairArrays(scored_frame(result))
    assert pairs.altered_margins("padded_answers").tolist() == [2.0 - 5.0]
    assert pairs.altered_margins("same_image").tolist() == [9.0 - 5.0]


def test_interventions_are_named_by_name_family_or_group():
    assert named(["all"]) == list(INTERVENTIONS) and named(["none"]) == []
    assert named(["style", "blank_image"]) == ["blank_image", *named(["style"])]
    with pytest.raises(ConfigError, match="did you mean blank_image"):
        named(["blank_imgae"])


def test_a_sample_has_whole_prompts_and_grows_nested():
    rows = [asked(i, f"What is number {i // 2}?") for i in range(2000)]
    drawn = {share: {row.id for row in rows if is_sampled(row, share)} for share in (0.1, 0.3, 1.0)}
    assert len(drawn[1.0]) == 2000 and drawn[0.1] < drawn[0.3]
    assert abs(len(drawn[0.1]) - 200) < 70 and abs(len(drawn[0.3]) - 600) < 110
    by_prompt: dict[str, set[bool]] = {}
    for row in rows:
        by_prompt.setdefault(cluster_of(row), set()).add(row.id in drawn[0.1])
    assert len(by_prompt) == 1000 and all(len(inside) == 1 for inside in by_prompt.values())
