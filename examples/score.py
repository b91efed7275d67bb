"""Scores answers to a question about an image.

python examples/score.py --model outputs/best --image cat.jpg "What is this?" "A cat." "A dog."
"""

import argparse

from vlmrm import load_scorer


def main() -> None:
    parser = argparse.ArgumentParser(description="Score answers to a question about an image.")
    parser.add_argument("--model", required=True, help="a trained checkpoint")
    parser.add_argument("--image", required=True)
    parser.add_argument("question")
    parser.add_argument("answers", nargs="+")
    words = parser.parse_args()

    content = [{"type": "image", "image": words.image}, {"type": "text", "text": words.question}]
    question = {"role": "user", "content": content}
    conversations = [[question, {"role": "assistant", "content": answer}] for answer in words.answers]
    for score, answer in zip(load_scorer(words.model).score(conversations), words.answers, strict=True):
        print(f"{score:+9.4f}  {answer}")


if __name__ == "__main__":
    main()
